"""The page of environment variables has those that the code reads."""

import ast
import re
from pathlib import Path

from tools.docs.page import ROOT

PAGE = ROOT / "docs" / "reference" / "environment.md"
_NAME = re.compile(r"RANK|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
# Constants of the operating system and of Python in the same modules.
_OTHER_CONSTANTS = re.compile(r"(?:SC|O|RWF|FIRST)_\w+")
# torch_internals sets these for a moment, and nobody else.
_SET_FOR_A_MOMENT = {"HF_DEACTIVATE_ASYNC_LOAD", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def variables_of_code() -> set[str]:
    """The names in modules that look at the environment."""
    names = set()
    for folder in ("stagepack", "loaders"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= _variables_of_module(path)
    return names - _SET_FOR_A_MOMENT


def _variables_of_module(path: Path) -> set[str]:
    text = path.read_text()
    if "os.environ" not in text:
        return set()
    constants = {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in constants if _NAME.fullmatch(text) and not _OTHER_CONSTANTS.fullmatch(text)}


def test_the_page_has_the_variables_of_the_code() -> None:
    listed = set(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE))
    named = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    assert named == variables_of_code()
