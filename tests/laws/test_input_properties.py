"""A model whose answer depends on what torch.export fixes of its inputs, besides values and sizes, is refused at export."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.capture.asked_properties import other_inputs
from stagepack.capture.inputs import Inputs
from stagepack.errors import AnswerDiffersError, ExportWarning, StageFailedError, UnsupportedError
from tests.laws.function_model import Calls

IMAGES = torch.arange(96.0).reshape(2, 3, 4, 4)
MATRIX = torch.arange(12.0).reshape(3, 4).clone()

ASKS: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "is_contiguous": (lambda x: x * 2 if x.is_contiguous() else x * 3, MATRIX),
    "is_contiguous_of_a_transposed_example": (lambda x: x * 2 if x.is_contiguous() else x * 3, MATRIX.t()),
    "is_contiguous_of_a_result": (lambda x: x * 2 if (x + 1).is_contiguous() else x * 3, MATRIX),
    "channels_last": (lambda x: x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3, IMAGES),
    "channels_last_example": (
        lambda x: x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3,
        IMAGES.to(memory_format=torch.channels_last),
    ),
    "stride": (lambda x: x * x.stride(0), MATRIX),
    "stride_by_operator": (lambda x: x * torch.ops.aten.sym_stride.int(x, 0), MATRIX),
    "dim_order": (lambda x: x + x.dim_order()[0], MATRIX),
    "storage_offset": (lambda x: x + x.storage_offset(), MATRIX),
    "untyped_storage": (lambda x: x + x.untyped_storage().nbytes(), MATRIX),
    "is_conj": (lambda x: x * 2 if x.is_conj() else x * 3, torch.complex(MATRIX, MATRIX)),
    "is_neg": (lambda x: x * 2 if torch.is_neg(x) else x * 3, MATRIX),
    "requires_grad": (lambda x: x * 2 if x.requires_grad else x * 3, MATRIX),
    "is_leaf": (lambda x: x * 2 if x.is_leaf else x * 3, MATRIX),
    "grad_fn": (lambda x: x * 2 if x.grad_fn is None else x * 3, MATRIX),
    "is_inference": (lambda x: x * 2 if x.is_inference() else x * 3, MATRIX),
    "is_grad_enabled": (lambda x: x * 2 if torch.is_grad_enabled() else x * 3, MATRIX),
}


@pytest.mark.parametrize("name", ASKS)
def test_answer_that_depends_on_a_property_is_refused(name: str, tmp_path: Path) -> None:
    function, x = ASKS[name]
    with pytest.raises(AnswerDiffersError, match="--allow-difference"):
        stagepack.export(Calls(function), (x,), out=tmp_path / "m.stagepack")
    assert not (tmp_path / "m.stagepack").exists()


def test_error_names_the_question_and_the_line(tmp_path: Path) -> None:
    model = Calls(lambda x: x * 2 if x.is_contiguous() else x * 3)
    expected = r"asks for the memory layout of its inputs, by is_contiguous \(.*test_input_properties.py, line \d+"
    with pytest.raises(AnswerDiffersError, match=expected):
        stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack")


def test_layout_of_one_input_of_several_is_tried(tmp_path: Path) -> None:
    model = Calls(lambda x, y: x * 2 if x.is_contiguous() and not y.is_contiguous() else x * 3)
    with pytest.raises(AnswerDiffersError, match="with the tensor number 2 of the inputs in column-major memory"):
        stagepack.export(model, (MATRIX, MATRIX + 1), out=tmp_path / "m.stagepack")


def test_dependence_on_a_property_can_be_allowed(tmp_path: Path) -> None:
    model = Calls(lambda x: x * 2 if x.is_contiguous() else x * 3)
    with pytest.warns(ExportWarning, match="answers as the captured program does"):
        bundle = stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack", allow_difference=True)
    assert torch.equal(stagepack.load(bundle)(MATRIX), MATRIX * 2)


ANSWERS_ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "asks_and_copies": lambda x: (x if x.is_contiguous() else x.contiguous()).sum(0),
    "asserts": lambda x: x * 2 if x.stride(0) >= 0 and x.storage_offset() >= 0 else x,
    "reshape": lambda x: x.reshape(-1, 2) + 1,
    "contiguous_and_view": lambda x: x.contiguous().view(-1) * 2,
    "contiguous_of_a_result_and_view": lambda x: (x + 1).contiguous().view(-1) * 2,
    "contiguous_and_as_strided": lambda x: x.contiguous().as_strided((2, 4), (4, 1)) + 1,
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)) + 1,
    "random_in_the_order_of_memory": torch.rand_like,
}


@pytest.mark.parametrize("name", ANSWERS_ALIKE)
def test_model_without_dependence_answers_in_all_layouts(name: str, tmp_path: Path) -> None:
    model = Calls(ANSWERS_ALIKE[name])
    pipe = stagepack.load(stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack"))
    for _, other in other_inputs(Inputs(args=(MATRIX,)), ["memory layout"]):
        (x,) = other.of(Inputs(args=(MATRIX,))).args
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(pipe(x), expected), other.description


def test_input_of_another_layout_is_written_as_in_the_model(tmp_path: Path) -> None:
    model = Calls(lambda x: (x.contiguous().add_(1), x * 2))
    pipe = stagepack.load(stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack"))
    for _, other in other_inputs(Inputs(args=(MATRIX,)), ["memory layout"]):
        if other.description.startswith("expanded"):
            continue
        (x,), (y,) = (copy.deepcopy(other.of(Inputs(args=(MATRIX,))).args) for _ in range(2))
        assert all(map(torch.equal, pipe(x), model(y)))
        assert torch.equal(x, y), other.description


def test_copies_that_no_input_needs_are_not_traced(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Calls(lambda x: (x + 1).contiguous().view(-1)))
    bundle = stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack")
    assert bundle.entry_point.stages[0].nodes == 3


def test_layout_that_a_view_does_not_allow_is_refused(tmp_path: Path) -> None:
    model = Calls(lambda x: (x if x.is_contiguous() else x.contiguous()).view(-1) * 2)
    pipe = stagepack.load(stagepack.export(model, (MATRIX,), out=tmp_path / "m.stagepack"))
    with pytest.raises(StageFailedError, match="view size is not compatible"):
        pipe(MATRIX.t().contiguous().t())


@pytest.fixture
def double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_bundle_keeps_the_default_dtype_of_its_export(double_precision: None, tmp_path: Path) -> None:
    x = torch.rand(3, 4)
    model = Calls(lambda x: (x + torch.ones(4), torch.full((2,), 1.5), torch.rand(3), torch.arange(0.0, 1.0, 0.25)))
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack")
    torch.manual_seed(0)
    expected = model(x)
    torch.set_default_dtype(torch.float32)
    pipe = stagepack.load(bundle)
    torch.manual_seed(0)
    assert all(map(torch.equal, pipe(x), expected))


def test_division_by_the_default_dtype_of_the_export_is_refused(double_precision: None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=re.escape("the default dtype is torch.float64 here")):
        stagepack.export(Calls(lambda x: x / 3), (torch.arange(4),), out=tmp_path / "m.stagepack")


def test_autocast_around_an_export_is_refused(tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="call it in the model's forward"):
        stagepack.export(torch.nn.Linear(4, 4), (MATRIX,), out=tmp_path / "m.stagepack")
