"""`docs/coverage.md` is written by `make coverage`, which takes long; here it is held to the zoo as it is now."""

from pathlib import Path

import pytest
import torch

from tests.zoo.cases import CASES
from tools.coverage import ELSEWHERE, PAGE, read


def _pinned_torch() -> str:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    return next(line.removeprefix("torch==") for line in constraints.splitlines() if line.startswith("torch=="))


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != _pinned_torch(),
    reason="the page is of the torch in constraints.txt: others have other examples of their own, and capture others",
)
def test_the_page_has_every_model_and_all_are_right() -> None:
    found = read(PAGE.read_text())
    assert [name for name, side in found if side == "ours"] == [case.name for case in CASES]
    ours = [cells for (_, side), cells in found.items() if side == "ours"]
    assert {(first, other) for first, other, _, _ in ours} <= {("right", "right"), ("right", "")}
    assert all(regions.isdigit() and float(smaller) > 1 for *_, regions, smaller in ours if regions)
    assert sum(bool(regions) for *_, regions, _ in ours) > 100


def test_what_onnx_runtime_does_whole_it_does_cut() -> None:
    found = {name: cells for (name, side), cells in read(PAGE.read_text()).items() if side == "onnx"}
    assert {name for name, (whole, _) in found.items() if whole == "right"} <= {
        name for name, (_, cut) in found.items() if cut == "right"
    }
    assert sum(whole == "right" for whole, _ in found.values()) > 250
    assert all(cut.startswith(("right", "draws random numbers")) for _, cut in found.values())


@pytest.mark.parametrize("test", [test for tests in ELSEWHERE.values() for test in tests])
def test_a_test_that_the_page_names_is_there(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text()
