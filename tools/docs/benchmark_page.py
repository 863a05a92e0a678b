"""The tables of docs/benchmarks.md, from the JSON files of docs/benchmarks."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmark_results import format_cell
from tools.docs.markdown import folded_block, table_lines

RESULTS_FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SECTION_TITLES = {
    "balance": "Balance of the stages",
    "profile": "Cuts by measured times",
    "traffic": "Bytes between stages",
    "graph_load": "Loading a graph",
    "export": "Exporting",
    "load": "Loading weights on the CPU",
    "gpu_load": "Loading weights on a GPU",
    "update": "Updates of a running pipeline",
    "gpu": "Stages on one GPU",
    "compile": "Compiling",
    "onnx": "ONNX Runtime: cut against whole",
    "serve": "Serving",
    "processes": "Stages in processes of their own",
    "hops": "From one process to the next",
    "train": "A training step",
    "generate": "Generating",
    "delta": "Deltas",
    "adapters": "Adapters",
}


def benchmark_tables() -> str:
    """All benchmarks, the newest run of each open, older ones folded."""
    runs_by_benchmark: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result_path in sorted(RESULTS_FOLDER.glob("*.json"), reverse=True):
        benchmark_name, _, run_date = result_path.stem.partition("-")
        run_record = json.loads(result_path.read_text())
        if not run_record["date"] == run_date:
            raise ValueError(
                f"{result_path.name}: expected the name to end with the date of the run, {run_record['date']}"
            )
        runs_by_benchmark[benchmark_name].append(run_record)
    if unknown_names := runs_by_benchmark.keys() - SECTION_TITLES.keys():
        raise ValueError(
            f"docs/benchmarks: expected one of {', '.join(SECTION_TITLES)}, found {', '.join(unknown_names)}"
        )
    page_parts = []
    for benchmark_name, section_title in SECTION_TITLES.items():
        for run_index, run_record in enumerate(runs_by_benchmark[benchmark_name]):
            run_lines = "\n".join(describe_run(run_record))
            if run_index == 0:
                page_parts.append(f"## {section_title}\n\n{run_lines}")
            else:
                page_parts.append(folded_block(f"Run of {run_record['date']}", run_lines))
    return "\n\n".join(page_parts)


def describe_run(run_record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one run: its command, its machine, its tables."""
    machine_facts = ", ".join(
        f"{fact_name} {fact_value}" for fact_name, fact_value in run_record["environment"].items()
    )
    yield f"`{run_record['command']}`, {run_record['date']}; {machine_facts}."
    for result_table in run_record["tables"]:
        yield ""
        yield f"**{result_table['title']}**"
        yield ""
        first_column, *further_columns = result_table["columns"]
        columns = [first_column, *(f"#{column}" for column in further_columns)]
        yield from table_lines(columns, (map(format_cell, row) for row in result_table["rows"]))
        if table_note := result_table.get("note"):
            yield ""
            yield table_note
