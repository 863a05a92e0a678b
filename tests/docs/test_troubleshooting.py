"""Each message of the page Troubleshooting is one of the code; each command of "Which command" exists, and none is left out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from stagepack.cli import main
from tools.docs.page import ROOT

PAGE = ROOT / "docs/how-to/troubleshooting.md"
MESSAGES = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)


def texts(folder: Path) -> Iterator[str]:
    """The string constants of the code, with … for what is filled in."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.fixture(scope="module")
def all_texts() -> list[str]:
    return [text for folder in ("stagepack", "loaders") for text in texts(ROOT / folder)]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_exists(message: str, all_texts: list[str]) -> None:
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert any(re.search(pattern, text, re.DOTALL) for text in all_texts)


def test_the_page_of_commands_has_each_command() -> None:
    page = (ROOT / "docs/how-to/which-command.md").read_text()
    assert set(re.findall(r"stagepack ([a-z0-9]+)", page)) == set(main.list_commands(click.Context(main)))
