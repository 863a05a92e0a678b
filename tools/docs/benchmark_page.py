"""The tables of docs/benchmarks.md, from the JSON files of docs/benchmarks."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmark_results import format_cell

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
TITLES = {
    "balance": "Balance of the stages",
    "traffic": "Bytes between stages",
    "graph_load": "Loading a graph",
    "compile": "Compiling",
    "onnx": "ONNX Runtime: cut against whole",
    "serve": "Serving",
}


def benchmark_tables() -> str:
    """All benchmarks, the newest run of each open, older ones folded."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(FOLDER.glob("*.json"), reverse=True):
        name, _, date = path.stem.partition("-")
        record = json.loads(path.read_text())
        if not record["date"] == date:
            raise ValueError(f"{path.name}: expected the name to end with the date of the run, {record['date']}")
        runs[name].append(record)
    if unknown := runs.keys() - TITLES.keys():
        raise ValueError(f"docs/benchmarks: expected one of {', '.join(TITLES)}, found {', '.join(unknown)}")
    parts = []
    for name, title in TITLES.items():
        for number, record in enumerate(runs[name]):
            lines = "\n".join(_run(record))
            if number == 0:
                parts.append(f"## {title}\n\n{lines}")
            else:
                indented = "\n".join(f"    {line}" if line else "" for line in lines.splitlines())
                parts.append(f'??? note "Run of {record["date"]}"\n\n{indented}')
    return "\n\n".join(parts)


def _run(record: dict[str, Any]) -> Iterator[str]:
    facts = ", ".join(f"{name} {value}" for name, value in record["environment"].items())
    yield f"`{record['command']}`, {record['date']}; {facts}."
    for table in record["tables"]:
        yield ""
        yield f"**{table['title']}**"
        yield ""
        yield f"| {' | '.join(table['columns'])} |"
        yield "|" + "|".join("---" if number == 0 else "--:" for number in range(len(table["columns"]))) + "|"
        for row in table["rows"]:
            yield f"| {' | '.join(map(format_cell, row))} |"
        if note := table.get("note"):
            yield ""
            yield note
