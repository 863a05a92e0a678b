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

Cell = str | int | float


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
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row and print it."""
        if not self.rows:
            print(f"{self.title}\n{self._line(self.columns)}")
        self.rows.append(cells)
        print(self._line([format_cell(cell) for cell in cells]), flush=True)

    def _line(self, texts: Sequence[str]) -> str:
        widths = [max(len(column), 9) for column in self.columns]
        first = texts[0].ljust(max(widths[0], 24))
        return "  ".join([first, *(text.rjust(width) for text, width in zip(texts[1:], widths[1:], strict=True))])


@dataclass(slots=True)
class BenchmarkResults:
    """All that one run of a benchmark measured.

    Attributes:
        tables: the results.
    """

    tables: list[ResultTable] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> ResultTable:
        """Begin a table."""
        self.tables.append(ResultTable(title, columns))
        return self.tables[-1]


def format_cell(cell: Cell) -> str:
    """A cell as people read it: four significant digits, thousands separated."""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


@contextmanager
def benchmark_results(path: Path | None, **environment: str) -> Iterator[BenchmarkResults]:
    """Collect the results of a run, and write them to a file when it ends.

    Args:
        path: the file; None writes nothing.
        environment: facts about the run beside those of this machine, such as the device.
    """
    results = BenchmarkResults()
    yield results
    if path is not None:
        record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": shlex.join(["python", "-m", f"tools.{Path(sys.argv[0]).stem}", *_arguments()]),
            "environment": machine_facts() | environment,
            "tables": [asdict(table) for table in results.tables],
        }
        path.write_text(json.dumps(record, indent=1) + "\n")


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge the figures: processor, cores, Python and torch."""
    import torch  # noqa: PLC0415 - a benchmark imports it when it is ready to

    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _arguments() -> list[str]:
    """The arguments of the command line without ``--json FILE``."""
    arguments = sys.argv[1:]
    if "--json" in arguments:
        position = arguments.index("--json")
        del arguments[position : position + 2]
    return [argument for argument in arguments if not argument.startswith("--json=")]
