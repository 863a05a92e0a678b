"""What ONNX Runtime answers right when torch exports it whole, it answers right when it is cut in three."""

from pathlib import Path

import pytest

from tests.zoo.case import Case
from tests.zoo.cases import CASES, named
from tests.zoo.in_onnxruntime import DRAWS, RIGHT, cut, whole
from tests.zoo.test_zoo import name_of

# Several kinds; `make test-zoo` runs all.
QUICK = named("aliasing-einsum-that-is-a-view", "regions-while-loop")


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: name_of(case),
)
def test_cut_is_as_right_as_whole(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    found = cut(case, capture, tmp_path)
    if whole(capture, tmp_path) == RIGHT:
        # torch leaves the checks of the model itself out of the ONNX model: our stages that have them stay in torch.
        others = {number: reason for number, reason in found.torch_only.items() if "aten._assert_scalar" not in reason}
        assert (found.answer, others) == (RIGHT, {})
    else:
        assert found.answer in (RIGHT, DRAWS)
