"""`docs/coverage.md` is written by `make coverage`, which takes long; here it is held to the zoo as it is now."""

import re
from pathlib import Path

import pytest

from tests.zoo.cases import CASES
from tools.coverage import ELSEWHERE, PAGE


def test_the_page_has_every_model_and_all_are_right() -> None:
    lines = re.findall(
        r"^\| `([\w-]+)` \| .*? \| (\w+) \| (\w*) \| (\w*) \| ([\d.]*) \|", PAGE.read_text(), re.MULTILINE
    )
    assert [name for name, *_ in lines] == [case.name for case in CASES]
    assert {(first, other) for _, first, other, _, _ in lines} <= {("right", "right"), ("right", "")}
    assert all(regions.isdigit() and float(smaller) > 1 for *_, regions, smaller in lines if regions)
    assert sum(bool(regions) for *_, regions, _ in lines) > 100


@pytest.mark.parametrize("test", [test for tests in ELSEWHERE.values() for test in tests])
def test_a_test_that_the_page_names_is_there(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text()
