"""Every promise of SECURITY.md names rules of the specification, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

from tools.docs.page import ROOT
from tools.docs.references import specified_rules

_TEST_PATTERN = re.compile(r"`([^`]+\.py)::(\w+)`")


def promises() -> list[list[str]]:
    """The rows of the tables of promises: the promise, its rules, its tests."""
    section = (ROOT / "SECURITY.md").read_text().partition("## What is promised\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return [row for row in rows if row[0] != "promise"]


@cache
def collected_tests(path: Path) -> frozenset[str]:
    """The functions of a file that pytest collects."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_promise_names_tests_that_exist() -> None:
    assert len(promises()) > 20
    for promise, _, tests in promises():
        named_tests = _TEST_PATTERN.findall(tests)
        assert len(named_tests) == tests.count("`") // 2 > 0, promise
        for file_name, test_name in named_tests:
            assert test_name in collected_tests(ROOT / file_name), f"{file_name}::{test_name}"


def test_every_rule_that_a_promise_names_is_in_the_specification() -> None:
    known_rules = {rule for rule, _ in specified_rules()}
    for promise, rules, _ in promises():
        assert known_rules.issuperset(rules.split(", ") if rules else ()), promise


def test_how_to_report_is_said_without_an_address() -> None:
    page_text = (ROOT / "SECURITY.md").read_text()
    assert "**Report a vulnerability**" in page_text
    assert "@" not in page_text
