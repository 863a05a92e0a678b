"""Memory that a graph has not written reaches no result, no state and no other stage: it holds what others' requests left."""

import ctypes
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.argument_guards import guarded_operator
from stagepack.errors import AnswerDiffersError
from stagepack.format.operators import RUN_BY_DEFAULT, listed_verdicts
from stagepack.unwritten_memory import ALLOCATING_OPERATORS, Call, overwritten_results
from stagepack_loaders.torch.stage import TorchStage
from tests.laws.function_model import Calls
from tests.modules import module_of
from tools.operators.hostile_arguments import bind
from tools.operators.hostile_calls import MakeCall, call_hostilely, run
from tools.operators.unwritten_memory import find_unwritten, find_unwritten_in_bundle
from tools.operators.valid_calls import find_operator, quantized_calls, recorded_calls

RUN = sorted(name for name, verdict in listed_verdicts().items() if verdict in RUN_BY_DEFAULT)
# Larger than what the C library keeps for each thread, which it does not fill.
X = torch.arange(600.0).reshape(30, 20)


@pytest.fixture
def fill_memory() -> Iterator[Callable[[int], None]]:
    """Let the C library fill the memory that it gives out with a byte."""
    libc = ctypes.CDLL(None)
    yield lambda byte: libc.mallopt(-6, byte)
    libc.mallopt(-6, 0)


def partly_written(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    result[:10] = x[:10]
    return result


def run_keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Its state is unwritten memory after a call."""
    result = self.kept + x
    self.kept.copy_(x.new_empty(30, 20))
    return result


MODELS: dict[str, torch.nn.Module] = {
    "empty": Calls(lambda x: torch.empty(30, 20) + 0 * x),
    "empty_like": Calls(torch.empty_like),
    "empty_permuted": Calls(lambda x: torch.empty_permuted((30, 20), (1, 0)) * x),
    "empty_strided": Calls(lambda x: torch.empty_strided((30, 20), (1, 40)).as_strided((600,), (1,)) + x.flatten()),
    "new_empty": Calls(lambda x: x.new_empty(30, 20)),
    "new_empty_strided": Calls(lambda x: x.new_empty_strided((30, 20), (20, 1))),
    "partly": Calls(partly_written),
    "state": module_of(run_keeps, kept=torch.zeros(30, 20)),
    "training": torch.nn.Sequential(torch.nn.Dropout(0.5), Calls(torch.empty_like)).train(),
}


def answers(pipeline: Any, fill_memory: Callable[[int], None]) -> list[list[torch.Tensor]]:
    """Two calls one after another, in memory that was filled with each of two bytes."""
    found = []
    for byte in (0x11, 0xEE):
        fill_memory(byte)
        torch.manual_seed(0)
        found.append([pipeline(X).clone(), pipeline(X).clone()])
        fill_memory(0)
        pipeline.reset_state()
    return found


@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
@pytest.mark.parametrize("name", MODELS)
def test_unwritten_memory_is_zero(name: str, tmp_path: Path, fill_memory: Callable[[int], None]) -> None:
    bundle = stagepack.export(MODELS[name], (X,), out=tmp_path / "m.stagepack", allow_difference=True)
    first, second = answers(stagepack.load(bundle), fill_memory)
    assert all(map(torch.equal, first, second))
    assert first[0].isfinite().all()


@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
@pytest.mark.parametrize("name", ["empty_like", "partly"])
def test_unwritten_memory_is_zero_in_onnx_runtime(
    name: str, tmp_path: Path, fill_memory: Callable[[int], None]
) -> None:
    bundle = stagepack.export(MODELS[name], (X,), out=tmp_path / "m.stagepack", allow_difference=True)
    assert stagepack.add_onnx(bundle.path).torch_only == {}
    expected = torch.zeros(30, 20)
    expected[:10] = X[:10] if name == "partly" else 0
    pipeline = stagepack.load(bundle.path, runtime="onnxruntime")
    fill_memory(0x11)
    assert torch.equal(torch.as_tensor(pipeline(X)), expected)


def test_a_model_that_returns_unwritten_memory_is_refused(tmp_path: Path, fill_memory: Callable[[int], None]) -> None:
    fill_memory(0x11)  # else the model may find zeros there, and answer as its bundle does
    with pytest.raises(AnswerDiffersError):
        stagepack.export(MODELS["empty_like"], (X,), out=tmp_path / "m.stagepack")


@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
def test_a_fill_that_a_write_covers_is_left_out(tmp_path: Path) -> None:
    """Each model, and how many of its allocating operators are called without a fill."""
    models: list[tuple[Callable[..., Any], int]] = [
        (lambda x: torch.empty_like(x).fill_(2), 1),
        (lambda x: x.new_empty(3).copy_(x[0, :3]), 1),
        (lambda x: torch.empty(30, 20).copy_(x) + torch.empty_like(x).zero_(), 2),
        (partly_written, 0),
        (lambda x: torch.empty_strided((2, 2), (1, 9)).fill_(2) + x[0, 0], 0),
    ]
    for index, (function, count) in enumerate(models):
        bundle = stagepack.export(Calls(function), (X,), out=tmp_path / f"{index}.stagepack", allow_difference=True)
        pipeline = stagepack.load(bundle)
        if count:
            assert torch.equal(pipeline(X), function(X))
        stage = pipeline.stages[0]
        assert isinstance(stage, TorchStage)
        targets = [node.target for node in stage.graph_module.graph.nodes if node.op == "call_function"]
        allocating = [target for target in targets if str(inspect.unwrap(target)) in ALLOCATING_OPERATORS]
        assert allocating
        assert sum(inspect.unwrap(target) is target for target in allocating) == count


def test_an_argument_that_is_read_is_not_taken_for_written() -> None:
    calls = [Call("aten.empty_like.default", "x", ["x"], ["y"]), Call("aten.copy_.default", None, ["y", "x"], ["z"])]
    assert list(overwritten_results(calls)) == []
    calls[1] = Call("aten.copy_.default", "y", ["y", "y"], ["z"])
    assert list(overwritten_results(calls)) == []
    calls[1] = Call("aten.copy_.default", "y", ["y", "x"], ["z"])
    assert list(overwritten_results(calls)) == ["y"]


@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy"])
def test_memory_outside_of_a_tensor_is_not_shown(name: str, tmp_path: Path) -> None:
    view = getattr(torch, name)
    bundle = stagepack.export(Calls(lambda x: view(x, (2, 4), (4, 1)) * 1), (X[0],), out=tmp_path / "m.stagepack")
    pipeline = stagepack.load(bundle)
    assert torch.equal(pipeline(X[1]), X[1, :8].reshape(2, 4))
    operator = guarded_operator(find_operator(f"aten.{name}.default"))
    with pytest.raises(ValueError, match="expected a view of the elements 0 to 39 of the memory, found 36 to 40"):
        operator(X[1], (5,), (1,), 36)


@pytest.mark.parametrize("name", ["aten.resize_.default", "aten.empty.out"])
def test_a_tensor_is_not_enlarged(name: str) -> None:
    tensor = X[0].clone()
    arguments = {"self" if "resize" in name else "out": tensor}
    guarded_operator(find_operator(name))(size=[4, 5], **arguments)
    with pytest.raises(ValueError, match="at most the 20 elements that the tensor has memory for, found 21"):
        guarded_operator(find_operator(name))(size=[3, 7], **arguments)


VALID_CALLS = quantized_calls() | {
    name: [bind(find_operator(name), args, {})]
    for name, args in {
        "aten.as_strided_scatter.default": (X, X[0, :6].reshape(2, 3), (2, 3), (3, 1)),
        "aten.grid_sampler.default": (torch.rand(1, 2, 5, 5), torch.rand(1, 3, 3, 2), 0, 0, False),
        "aten.grid_sampler_2d.default": (torch.rand(1, 2, 5, 5), torch.rand(1, 3, 3, 2), 0, 0, False),
        "aten.grid_sampler_3d.default": (torch.rand(1, 2, 5, 5, 5), torch.rand(1, 3, 3, 3, 3), 0, 0, False),
        "prims.copy_strided.default": (X, (20, 1)),
    }.items()
}


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("last", [0, 5, 16, -3])
def test_what_no_group_has_is_zero(last: int, by_columns: bool, fill_memory: Callable[[int], None]) -> None:
    rows, matrices, ends = torch.randn(16, 32), torch.randn(2, 32, 16), torch.tensor([0, last], dtype=torch.int32)
    call = (torch.randn(2, 8, 32), torch.randn(32, 16), ends) if by_columns else (rows, matrices, ends)
    fill_memory(0x11)
    result = guarded_operator(find_operator("aten._grouped_mm.default"))(*call)
    assert not (result[:, max(last, 0) :] if by_columns else result[max(last, 0) :]).any()


SHOWED_MEMORY = sorted({
    *ALLOCATING_OPERATORS, "aten._grouped_mm.default", "aten._int_mm.default", "aten.as_strided.default",
    "aten.as_strided_scatter.default", "aten.empty.out",
    "aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default", "aten.resize_.default",
    "aten.resize_as_.default", "prims.copy_strided.default",
})  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", SHOWED_MEMORY)
def test_operators_that_showed_memory_do_not(name: str) -> None:
    outcome = call_hostilely(name, VALID_CALLS.get(name, ()), 60, find_unwritten)
    assert not outcome.signals
    assert outcome.counts["differed"] == 0
    assert outcome.counts["returned"]


@pytest.mark.parametrize(
    ("name", "arguments"), [("aten.empty_like.default", (X,)), ("aten.cat.default", ([X, X[:3]],))]
)
def test_a_bundle_of_one_call_answers(name: str, arguments: tuple[Any, ...]) -> None:
    operator = find_operator(name)
    assert find_unwritten_in_bundle(operator, bind(operator, arguments, {})) == "returned"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("make_call", [find_unwritten, find_unwritten_in_bundle])
def test_no_operator_that_runs_by_default_shows_memory(make_call: MakeCall, tmp_path: Path) -> None:
    run(RUN, recorded_calls(), tmp_path / "outcomes.jsonl", 20 if make_call is find_unwritten else 8, make_call)
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [outcome for outcome in outcomes if outcome.get("differed")] == []
    assert sum(outcome["returned"] for outcome in outcomes) > 2000
