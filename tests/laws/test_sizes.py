"""Sizes at the ends of their ranges: what a bundle admits there, it answers as the model does."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.errors import ExportWarning, InputError, StagepackError
from tests.laws.sized_models import Counter, Function, sized_models
from tests.modules import cut_at_most, module_of

SIZES = (0, 1, 2, 3)
# Models whose programs have a guard against a size that the model answers, or answer it otherwise; each call of that size is refused.
GUARDED = {
    "avg-pool-ceil",
    "branch-on-one",
    "conv2d-padded",
    "embedding-bag",
    "from-second",
    "half",
    "im2col",
    "index",
    "squeeze-all",
}
MODELS = sized_models()


def export(model: torch.nn.Module, args: tuple[Any, ...], out: Path, shapes: Any, **options: Any) -> stagepack.Bundle:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "stages: ", ExportWarning)  # fewer operators than stages
        # A function of *args has one parameter.
        is_variadic = isinstance(model, Function)
        return stagepack.export(model, args, out=out, dynamic_shapes=(shapes,) if is_variadic else shapes, **options)


def resized(args: tuple[torch.Tensor, ...], axes: list[tuple[int, int]], sizes: tuple[int, ...]) -> list[torch.Tensor]:
    inputs = list(args)
    for (index, axis), size in zip(axes, sizes, strict=True):
        positions = torch.arange(size) % inputs[index].shape[axis]
        inputs[index] = inputs[index].index_select(axis, positions)
    return [tensor.clone() for tensor in inputs]


def answer(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor] | Exception:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            # Once a process: std and var of a single row or of none.
            warnings.filterwarnings("ignore", ".*degrees of freedom", UserWarning)
            result = function(*[tensor.clone() for tensor in inputs])
    except Exception as error:  # noqa: BLE001 - models raise errors of any kind
        return error
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", MODELS)
def test_every_size_that_a_model_answers_is_answered_alike(name: str, tmp_path: Path) -> None:
    model, args, dims = MODELS[name]
    shapes = tuple(dict.fromkeys(axes, Dim.AUTO) for axes in dims)
    pipeline = stagepack.load(cut_at_most(export(model, args, tmp_path / "model", shapes), 2))
    axes = [(index, axis) for index, axes in enumerate(dims) for axis in axes]
    for sizes in itertools.product(SIZES if len(axes) < 3 else (0, 1, 9), repeat=len(axes)):
        inputs = resized(args, axes, sizes)
        if isinstance(model, Counter):
            pipeline.reset_state()
            model.total.zero_()
        expected, found = answer(model, inputs), answer(pipeline, inputs)
        if isinstance(expected, Exception):
            assert isinstance(found, StagepackError), sizes
        elif name in GUARDED and isinstance(found, Exception):
            assert isinstance(found, InputError), sizes
        else:
            assert isinstance(found, list), (sizes, found)
            for tensor, expected_tensor in zip(found, expected, strict=True):
                torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=0, equal_nan=True)


def test_a_size_that_the_program_answers_otherwise_is_left_out_of_a_declared_range(tmp_path: Path) -> None:
    model, args, _ = MODELS["branch-on-one"]
    says = r"batch from 0\.\.64 to 0\.\.64 without 1: at 1, its captured program answers"
    with pytest.warns(ExportWarning, match=says):
        bundle = export(model, args, tmp_path / "model", ({0: Dim("batch", min=0, max=64)},))
    pipeline = stagepack.load(bundle)
    for size in (0, 2):
        x = torch.randn(size, 4)
        assert torch.equal(pipeline(x), model(x))
    with pytest.raises(InputError, match="expected batch != 1"):
        pipeline(torch.randn(1, 4))


def test_a_declared_range_is_narrowed_where_its_lower_end_is_answered_otherwise(tmp_path: Path) -> None:
    model, args, _ = MODELS["squeeze-all"]
    says = r"batch from 1\.\. to 2\.\.: at 1, a value has another number of dimensions"
    with pytest.warns(ExportWarning, match=says):
        bundle = export(model, args, tmp_path / "model", ({0: Dim("batch", min=1)},))
    assert bundle.entry_point.symbols[0].min == 2


def test_the_smallest_size_that_was_asked_for_is_the_smallest_that_is_admitted(tmp_path: Path) -> None:
    model, args, _ = MODELS["linear"]
    for dim, smallest in [(Dim.AUTO(min=1, max=64), 1), (Dim.DYNAMIC(min=0), 0), (Dim("batch", min=2), 2)]:
        bundle = export(model, args, tmp_path / "model", ({0: dim},), overwrite=True)
        assert bundle.entry_point.symbols[0].min == smallest


def test_a_size_that_was_asked_for_and_cannot_be_had_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    model, args, _ = MODELS["max-rows"]
    says = r"args_0: dimension 0 from 0\.\. to 1\.\.: at 0, the model fails: IndexError"
    with pytest.warns(ExportWarning, match=says):
        export(model, args, tmp_path / "model", ({0: Dim.AUTO(min=0)},))


@pytest.mark.parametrize("size", [0, 1])
def test_an_example_that_torch_fixes_is_a_warning_with_advice(size: int, tmp_path: Path) -> None:
    model, (x,), _ = MODELS["linear"]
    with pytest.warns(ExportWarning, match=f"args_0: dimension 0: its size in the example is {size}, .* of 2 or more"):
        export(model, (x[:size],), tmp_path / "model", ({0: Dim.AUTO},))


def test_a_derived_size_begins_where_its_root_does(tmp_path: Path) -> None:
    half = Dim("half", min=1, max=8)
    model = torch.nn.Linear(4, 2).eval()
    pipeline = stagepack.load(
        stagepack.export(model, (torch.randn(6, 4),), out=tmp_path / "m", dynamic_shapes=({0: 2 * half},))
    )
    x = torch.randn(2, 4)
    assert torch.equal(pipeline(x), model(x))


def test_a_program_without_its_model_answers_what_it_can(tmp_path: Path) -> None:
    model, args, _ = MODELS["conv1d-same"]
    for dim, smallest in [(Dim.AUTO, 0), (Dim("batch", min=2, max=8), 2)]:
        program = torch.export.export(model, args, dynamic_shapes=(({0: dim},),))
        bundle = stagepack.export(program, out=tmp_path / "model", overwrite=True)
        assert bundle.entry_point.symbols[0].min == smallest
    program = torch.export.export(
        MODELS["squeeze-all"][0], MODELS["squeeze-all"][1], dynamic_shapes=(({0: Dim.AUTO},),)
    )
    pipeline = stagepack.load(stagepack.export(program, out=tmp_path / "model", overwrite=True))
    with pytest.raises(InputError):
        pipeline(torch.randn(1, 4))


def test_trials_leave_the_model_and_the_random_state_as_they_were(tmp_path: Path) -> None:
    model = Counter()
    with torch.no_grad():
        model.total.fill_(3.0)
    x = torch.randn(3, 4)
    random_state = torch.get_rng_state()
    export(model, (x,), tmp_path / "model", ({0: Dim.AUTO},))
    assert torch.equal(model.total, torch.full((4,), 3.0))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_sizes_are_tried_with_weights_that_are_in_a_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    bundle = stagepack.export(
        lambda: torch.nn.Linear(4, 2).eval(),
        (torch.randn(3, 4),),
        weights=tmp_path / "weights.pt",
        out=tmp_path / "model",
        dynamic_shapes={"input": {0: Dim.AUTO}},
    )
    x = torch.randn(1, 4)
    assert torch.equal(stagepack.load(bundle)(x), model(x))


def test_a_shape_that_the_program_states_wrongly_at_an_end_is_answered_alike(tmp_path: Path) -> None:
    """A slice by minus a size takes everything where the size is 0."""

    def last_columns(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.first(x)[:, -y.shape[0] :]
        return self.second(last), torch.cat([last, last], 1).sum(0)

    model = module_of(last_columns, first=torch.nn.Linear(8, 8), second=torch.nn.Linear(8, 2))
    shapes = {"x": {0: Dim.AUTO}, "y": {0: Dim("last", min=0, max=8)}}
    bundle = stagepack.export(model, (torch.randn(2, 9, 8), torch.randn(3)), out=tmp_path / "m", dynamic_shapes=shapes)
    for stages in (1, 2, 4):
        pipeline = stagepack.load(stagepack.recut(bundle, out=tmp_path / f"{stages}", stages=stages))
        for rows, last in itertools.product((0, 1, 3), (0, 1, 2, 8)):
            inputs = torch.randn(rows, 9, 8), torch.randn(last)
            for found, expected in zip(pipeline(*inputs), model(*inputs), strict=True):
                assert torch.equal(found, expected)


def test_inputs_that_need_the_same_size_are_admitted_at_it_together(tmp_path: Path) -> None:
    def masked_rows(_: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Leave out a mask of ones in eager mode only, as models of transformers do."""
        if not torch.compiler.is_exporting() and mask.all():
            return x * 1.0
        return x * mask[torch.arange(x.shape[0])]

    model, rows = module_of(masked_rows), {0: Dim.AUTO}
    example = (torch.rand(2, 4), torch.ones(2, 4))
    pipe = stagepack.load(stagepack.export(model, example, dynamic_shapes=(rows, rows), out=tmp_path / "m.stagepack"))
    for size in (0, 1, 2, 3):
        inputs = (torch.rand(size, 4), torch.ones(size, 4))
        assert torch.equal(pipe(*inputs), model(*inputs))
    with pytest.raises(StagepackError):
        pipe(torch.rand(2, 4), torch.ones(1, 4))


def test_operators_that_may_end_the_process_are_not_tried(tmp_path: Path) -> None:
    loss_backward = torch.ops.aten.nll_loss_backward
    backward = module_of(lambda self, grad, x, target: loss_backward(grad, x, target, None, 0, 10, torch.tensor(3.0)))
    example = (torch.rand(3), torch.rand(3, 4), torch.tensor([2, 3, 0]))
    rows = {0: Dim.AUTO}
    with pytest.warns(ExportWarning, match="nll_loss_backward may end the process at sizes that do not fit"):
        stagepack.export(backward, example, dynamic_shapes=(rows, {1: Dim.AUTO}, rows), out=tmp_path / "m.stagepack")


def test_operators_that_end_the_process_without_elements_are_not_run_without(tmp_path: Path) -> None:
    """torch divides by a size that is 0."""
    model, rows = module_of(lambda self, v, g: torch._weight_norm(v, g, 0)), {0: Dim.AUTO}
    example = (torch.rand(3, 4), torch.rand(3, 1))
    pipe = stagepack.load(stagepack.export(model, example, dynamic_shapes=(rows, rows), out=tmp_path / "m.stagepack"))
    for size in (1, 5):
        inputs = (torch.rand(size, 4), torch.rand(size, 1))
        assert torch.equal(pipe(*inputs), model(*inputs))
    with pytest.raises(StagepackError):
        pipe(torch.rand(0, 4), torch.rand(0, 1))


def test_a_dimension_that_a_tensor_does_not_have_is_ignored(tmp_path: Path) -> None:
    model, rows = torch.nn.Identity(), {0: Dim.AUTO}
    bundle = stagepack.export(model, (torch.tensor(3.0),), dynamic_shapes=(rows,), out=tmp_path / "m.stagepack")
    assert stagepack.load(bundle)(torch.tensor(4.0)) == 4
