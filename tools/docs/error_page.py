"""The reference of errors, from the classes of `stagepack.errors` and the rules of the specification."""

import inspect
import re
from pathlib import Path

from stagepack import errors

_SPEC = Path(__file__).parents[2] / "schema" / "SPEC.md"
_RULE = re.compile(r"^\*\*([A-Z]\d+)\*\* (.*?)(?=^\*\*[A-Z]\d+\*\*|^\||^#|^-|\Z)", re.MULTILINE | re.DOTALL)


def error_reference() -> str:
    """A table of the classes, and a table of the rules that errors name."""
    rows = ["| class | base | meaning |", "|---|---|---|"]
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error, errors.StagepackError):
            bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
            rows.append(f"| `{name}` | {bases} | {_one_line(inspect.getdoc(error) or '')} |")
    return "\n".join(rows)


def rule_reference() -> str:
    """A table of the rules, each with its first sentence."""
    rows = ["| rule | requirement |", "|---|---|"]
    for number, text in rules():
        sentence = re.split(r"(?<=[.:])\s", _one_line(text), maxsplit=1)[0].rstrip(":")
        rows.append(f"| [{number}](spec.md#{number}) | {sentence} |")
    return "\n".join(rows)


def rules() -> list[tuple[str, str]]:
    """The number and the text of each rule of the specification."""
    return [(match[1], match[2]) for match in _RULE.finditer(_SPEC.read_text())]


def _one_line(text: str) -> str:
    """The first paragraph of a text, in one line, as a cell of a table."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.replace("``", "`").replace("|", "\\|")
