"""The reference of errors, from the classes of `stagepack.errors` and the rules of the specification."""

import inspect
import re
from pathlib import Path

from stagepack import errors

_SPECIFICATION_PATH = Path(__file__).parents[2] / "schema" / "SPEC.md"
_RULE_PATTERN = re.compile(
    r'^\*\*([A-Z]\d+)\*\*<a id="\1"></a> (.*?)(?=^\*\*[A-Z]\d+\*\*|^\||^#|^-|\Z)', re.MULTILINE | re.DOTALL
)


def error_reference() -> str:
    """A table of the classes of errors and warnings, and a table of the rules that errors name."""
    table_rows = ["| class | base | meaning |", "|---|---|---|"]
    for class_name, error_class in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error_class, errors.StagepackError | Warning):
            base_names = ", ".join(f"`{base_class.__name__}`" for base_class in error_class.__bases__)
            table_rows.append(f"| `{class_name}` | {base_names} | {_one_line(inspect.getdoc(error_class) or '')} |")
    return "\n".join(table_rows)


def rule_reference() -> str:
    """A table of the rules, each with its first sentence."""
    table_rows = ["| rule | requirement |", "|---|---|"]
    for rule_number, rule_text in specified_rules():
        first_sentence = re.split(r"(?<=[.:])\s", _one_line(rule_text), maxsplit=1)[0].rstrip(":")
        table_rows.append(f"| [{rule_number}](../../schema/SPEC.md#{rule_number}) | {first_sentence} |")
    return "\n".join(table_rows)


def specified_rules() -> list[tuple[str, str]]:
    """The number and the text of each rule of the specification."""
    return [(match[1], match[2]) for match in _RULE_PATTERN.finditer(_SPECIFICATION_PATH.read_text())]


def _one_line(full_text: str) -> str:
    """The first paragraph of a text, in one line, as a cell of a table."""
    paragraph = " ".join(full_text.split("\n\n")[0].split())
    return paragraph.replace("``", "`").replace("|", "\\|")
