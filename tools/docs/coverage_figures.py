"""Figures of `docs/coverage.md` for the page that compares stagepack with `torch.distributed.pipelining`."""

from pathlib import Path

_PAGE_PATH = Path(__file__).parents[2] / "docs" / "coverage.md"

# Side -> its columns in the table of models, from 0: at the sizes of the example, and at other sizes.
_COLUMNS = {"stagepack": (2, 3), "pipelining": (6, 7)}


def coverage_figures() -> str:
    """How many models are right on each side, at the sizes of the example and at others."""
    table = _PAGE_PATH.read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    models = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    _, other_size_column = _COLUMNS["stagepack"]
    dynamic_models = [cells for cells in models if cells[other_size_column]]
    rows = [
        f"| {side} | {_outcomes(models, column)} | {_outcomes(dynamic_models, other_column)} |"
        for side, (column, other_column) in _COLUMNS.items()
    ]
    heading = f"| | {len(models)} models | {len(dynamic_models)} of them, called with other sizes than the example's |"
    return "\n".join([heading, "|---|---|---|", *rows])


def _outcomes(models: list[list[str]], column: int) -> str:
    """How many models are right, raise an error, and answer wrongly without one."""
    outcomes = [cells[column] for cells in models]
    right, wrong = outcomes.count("right"), outcomes.count("wrong")
    failed = len(outcomes) - right - wrong
    parts = [f"{right} right"]
    if failed:
        parts.append(f"{failed} raise an error")
    if wrong:
        parts.append(f"{wrong} wrong without an error")
    return ", ".join(parts)
