"""Results of benchmarks: printed as tables, and written as JSON files that the docs draw.

Every ``tools/bench_*.py`` takes ``--json FILE``. ``docs/benchmarks/`` keeps such files as ``BENCHMARK-DATE.json``; the page
``docs/benchmarks.md`` shows all of them.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CellValue = str | int | float


@dataclass(slots=True)
class ResultTable:
    """A table of results, printed row by row as they come.

    Attributes:
        title: what was measured.
        columns: the heading of each column, with its unit: ``first call, s``.
        rows: the cells; numbers are not rounded.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[CellValue]] = field(default_factory=list)

    def add(self, *cells: CellValue) -> None:
        """Add a row and print it."""
        if not self.rows:
            print(f"{self.title}\n{self._line(self.columns)}")
        self.rows.append(cells)
        print(self._line([format_cell(cell) for cell in cells]), flush=True)

    def _line(self, cell_texts: Sequence[str]) -> str:
        widths = [max(len(column_title), 9) for column_title in self.columns]
        first, *others = cell_texts
        shown = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        return "  ".join([first.ljust(max(widths[0], 40)), *shown])


@dataclass(slots=True)
class BenchmarkResults:
    """All that one run of a benchmark measured."""

    tables: list[ResultTable] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> ResultTable:
        """Begin a table."""
        self.tables.append(ResultTable(title, columns))
        return self.tables[-1]


def format_cell(cell: CellValue) -> str:
    """A cell as people read it: four significant digits, thousands separated."""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the command line with ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser


@contextmanager
def benchmark_results(json_path: Path | None, **environment: str) -> Iterator[BenchmarkResults]:
    """Collect the results of a run, and write them to a file when it ends.

    Args:
        json_path: the file; None writes nothing.
        environment: facts about the run beside those of this machine, such as the device.
    """
    run_results = BenchmarkResults()
    yield run_results
    if json_path is not None:
        run_record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": shlex.join(["python", "-m", f"tools.{Path(sys.argv[0]).stem}", *_benchmark_arguments()]),
            "environment": machine_facts() | environment,
            "tables": [asdict(result_table) for result_table in run_results.tables],
        }
        json_path.write_text(json.dumps(run_record, indent=1) + "\n")


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge the figures: processor, cores, Python and torch."""
    import torch  # noqa: PLC0415 - a benchmark imports it when it is ready to

    return {
        "processor": _processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor_name() -> str:
    cpuinfo_path = Path("/proc/cpuinfo")
    info_lines = cpuinfo_path.read_text().splitlines() if cpuinfo_path.exists() else []
    model_names = [info_line.split(":", 1)[1].strip() for info_line in info_lines if info_line.startswith("model name")]
    return model_names[0] if model_names else platform.machine()


def _benchmark_arguments() -> list[str]:
    """The arguments of the command line without ``--json FILE``."""
    kept_arguments = sys.argv[1:]
    if "--json" in kept_arguments:
        json_position = kept_arguments.index("--json")
        del kept_arguments[json_position : json_position + 2]
    return [kept_argument for kept_argument in kept_arguments if not kept_argument.startswith("--json=")]
