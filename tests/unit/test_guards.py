"""Conditions on sizes that a model was captured for: kept in the bundle, and asked of each call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.export import Dim

import stagepack
from stagepack.cli import main
from stagepack.errors import CaptureError, InputError, UnsupportedError
from stagepack.format.shapes import Symbol, format_guard
from tests.modules import module_of

AUTO = {0: Dim.AUTO}


class Branches(torch.nn.Module):
    """Computes otherwise for long inputs, and for an odd number of rows, than it does for its example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(rows) if rows.shape[0] % 2 == 0 else rows
        return hidden.sum() - others.sum() if rows.shape[0] + others.shape[0] <= 10 else hidden.sum()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("guards") / "model.stagepack"
    args = torch.ones(4, 4), torch.ones(3)
    return stagepack.export(Branches(), args, dynamic_shapes=(AUTO, AUTO), out=out, stages=2)


def test_a_bundle_has_the_conditions_of_the_capture(bundle: stagepack.Bundle) -> None:
    conditions = [format_guard(guard) for guard in bundle.entry_point.guards]
    assert any("%" in condition and condition.endswith("== 0") for condition in conditions)
    assert any(condition.endswith("<= 10") for condition in conditions)


def test_a_call_that_fits_is_answered(bundle: stagepack.Bundle) -> None:
    torch.manual_seed(0)
    model = Branches()
    pipeline = stagepack.load(bundle)
    for rows, others in [(4, 3), (2, 6), (6, 4)]:
        args = torch.randn(rows, 4), torch.randn(others)
        assert torch.equal(pipeline(*args), model(*args))


@pytest.mark.parametrize(("rows", "others", "condition"), [(3, 3, "% 2 == 0"), (8, 7, "<= 10")])
def test_a_call_that_the_model_answers_otherwise_is_refused(
    bundle: stagepack.Bundle, rows: int, others: int, condition: str
) -> None:
    with pytest.raises(InputError, match=f"expected .*{condition}, for which the model was captured, found"):
        stagepack.load(bundle)(torch.ones(rows, 4), torch.ones(others))


def test_the_conditions_stay_in_other_cuts_and_in_exported_programs(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    assert bundle.entry_point.guards
    recut = stagepack.recut(bundle, out=tmp_path / "recut.stagepack", stages=1)
    assert recut.entry_point.guards == bundle.entry_point.guards

    program = torch.export.export(Branches(), (torch.ones(4, 4), torch.ones(3)), dynamic_shapes=(AUTO, AUTO))
    torch.export.save(program, tmp_path / "program.pt2")
    for source in (program, tmp_path / "program.pt2"):
        exported = stagepack.export(source, out=tmp_path / "exported.stagepack", stages=1, overwrite=True)
        assert exported.entry_point.guards == bundle.entry_point.guards


def test_inspect_tells_the_conditions(bundle: stagepack.Bundle) -> None:
    assert "only for sizes with" in CliRunner().invoke(main, ["inspect", str(bundle.path)]).output


class Sliced(torch.nn.Module):
    """Computes otherwise for 32 rows than it does for its example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x))
        return hidden * 3 if x.shape[0] // 4 == 8 else hidden * 2


@pytest.fixture(scope="module")
def derived_bundle(tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    out = tmp_path_factory.mktemp("derived") / "model.stagepack"
    dynamic_shapes = {"x": {0: 4 * Dim("h", min=1, max=32)}}
    return stagepack.export(Sliced(), (torch.ones(12, 4),), dynamic_shapes=dynamic_shapes, out=out, stages=2)


def test_symbol_of_a_derived_dimension_has_the_name_and_range_of_the_caller(derived_bundle: stagepack.Bundle) -> None:
    assert derived_bundle.entry_point.symbols == (Symbol(name="h", min=1, max=32, example=3),)
    stagepack.load(derived_bundle)(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (0, "x: dimension 0: expected a multiple of 4 from 4 to 128, found 0"),
        (5, "x: dimension 0: expected a multiple of 4 from 4 to 128, found 5"),
        (132, "x: dimension 0: expected a multiple of 4 from 4 to 128, found 132"),
        (32, "expected h != 8, for which the model was captured, found h = 8 (x: dimension 0 is 32)"),
        (32, "; the nearest sizes that it takes: 28, 36"),
    ],
)
def test_refusal_speaks_of_the_dimension_of_the_caller(
    derived_bundle: stagepack.Bundle, rows: int, message: str
) -> None:
    with pytest.raises(InputError) as refusal:
        stagepack.load(derived_bundle)(torch.ones(rows, 4))
    assert message in str(refusal.value)


@pytest.mark.parametrize("stage_number", [0, 1])
def test_each_stage_checks_the_guards_on_its_inputs(derived_bundle: stagepack.Bundle, stage_number: int) -> None:
    stage = stagepack.load_stage(derived_bundle, stage_number)
    stage(torch.ones(28, 4))
    with pytest.raises(InputError, match="expected h != 8"):
        stage(torch.ones(32, 4))


def asks_for(condition: Callable[..., Any]) -> torch.nn.Module:
    """Computes otherwise where a function of its inputs is true."""
    return module_of(lambda self, x, y: x + y.sum() if condition(x, y) else x - y.sum())


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (lambda x, _: x.stride(1) == 2, r"sizes with Eq\(x.stride\(\)\[1\], 2\), .* pass contiguous tensors"),
        (lambda x, _: round(x.shape[0] / 4) == 2, r"sizes with .*x.shape\[0\].*: declare a smaller range, such as"),
        (lambda x, y: round(x.shape[0] / y.shape[0]) == 2, r"sizes with .*y.shape\[0\].*: make the others static"),
    ],
)
def test_condition_that_a_bundle_cannot_keep_is_refused_by_name(
    tmp_path: Path, condition: Callable[..., Any], message: str
) -> None:
    args = torch.ones(8, 8)[:, ::2], torch.ones(5)
    with pytest.raises(UnsupportedError, match=message):
        stagepack.export(asks_for(condition), args, dynamic_shapes=(AUTO | {1: Dim.AUTO}, AUTO), out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("factor", [1, 2])
def test_comparison_with_a_number_beyond_all_sizes_needs_no_guard(tmp_path: Path, factor: int) -> None:
    model = asks_for(lambda x, _: factor * x.shape[0] < 2**63 - 1)
    bundle = stagepack.export(model, (torch.ones(4), torch.ones(3)), dynamic_shapes=(AUTO, None), out=tmp_path / "x")
    assert not bundle.entry_point.guards


def test_padding_to_the_same_size_needs_no_guard_on_the_kernel(tmp_path: Path) -> None:
    model = module_of(lambda self, x, weight: torch.nn.functional.conv2d(x, weight, padding="same"))
    dims = tuple(dict.fromkeys(range(4), Dim.AUTO) for _ in range(2))
    example = (torch.rand(2, 3, 6, 6), torch.rand(4, 3, 3, 3))
    pipeline = stagepack.load(stagepack.export(model, example, dynamic_shapes=dims, out=tmp_path / "x"))
    for inputs in (example, (torch.rand(1, 3, 7, 9), torch.rand(2, 3, 5, 3))):
        assert torch.equal(pipeline(*inputs), model(*inputs))


def test_guards_of_a_result_that_another_input_equals_are_kept(tmp_path: Path) -> None:
    model = asks_for(
        lambda x, y: torch.nn.functional.interpolate(x[None, None], scale_factor=0.5).shape[2] == y.shape[0]
    )
    bundle = stagepack.export(model, (torch.ones(6), torch.ones(3)), dynamic_shapes=(AUTO, AUTO), out=tmp_path / "x")
    pipeline = stagepack.load(bundle)
    pipeline(torch.ones(9), torch.ones(4))
    with pytest.raises(InputError, match="for which the model was captured"):
        pipeline(torch.ones(9), torch.ones(5))


def test_modules_that_are_captured_alone_keep_their_guards(tmp_path: Path) -> None:
    inner = asks_for(lambda x, y: (x.shape[0] * y.shape[0]) % 5 == 0)
    model, args = module_of(lambda self, x, y: self.inner(x, y) * 2, inner=inner), (torch.ones(10), torch.ones(3))
    bundle = stagepack.export(model, args, dynamic_shapes=(AUTO, AUTO), modules=["inner"], out=tmp_path / "x")
    pipeline = stagepack.load(bundle)
    pipeline(torch.ones(4), torch.ones(5))
    with pytest.raises(InputError, match="% 5 == 0, for which the model was captured"):
        pipeline(torch.ones(4), torch.ones(6))


class NamedByKeywords(torch.nn.Module):
    """Has modules with names that no Python code can have as attributes, and a branch on a derived size."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "None", "for"):
            self.add_module(name, torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x * 3 if x.shape[0] % 9 == 5 else x * 2


@pytest.mark.parametrize("is_strict", [False, True])
def test_program_with_names_of_keywords_exports_from_memory_and_from_its_file(tmp_path: Path, is_strict: bool) -> None:
    torch.manual_seed(0)
    model, args = NamedByKeywords().eval(), (torch.ones(12, 4),)
    dynamic_shapes = {"x": {0: 4 * Dim("h", min=1, max=32)}}
    program = torch.export.export(model, args, dynamic_shapes=dynamic_shapes, strict=is_strict)
    torch.export.save(program, tmp_path / "program.pt2")
    from_memory = stagepack.export(program, out=tmp_path / "memory", stages=2)
    from_file = stagepack.export(tmp_path / "program.pt2", out=tmp_path / "file", stages=2)
    assert from_file.entry_point == from_memory.entry_point
    for bundle in (from_memory, from_file):
        pipeline, x = stagepack.load(bundle), torch.randn(8, 4)
        assert torch.equal(pipeline(x), model(x))
        with pytest.raises(InputError, match="% 9 != 5"):
            pipeline(torch.ones(32, 4))


def test_program_takes_an_example_of_other_sizes_than_it_was_traced_with(tmp_path: Path) -> None:
    program = torch.export.export(
        Sliced(), (torch.ones(12, 4),), dynamic_shapes={"x": {0: 4 * Dim("h", min=1, max=32)}}
    )
    bundle = stagepack.export(program, (torch.ones(20, 4),), out=tmp_path / "x", stages=2)
    assert bundle.entry_point.symbols == (Symbol(name="s0", min=1, max=32, example=5),)
    for rows, message in ((32, "s0 != 8"), (400, "a multiple of 4 from 4 to 128, found 400")):
        with pytest.raises(CaptureError, match=f"the example does not fit the captured program: .*{message}"):
            stagepack.export(program, (torch.ones(rows, 4),), out=tmp_path / "y", stages=2)
