"""An export writes only what a default load accepts and what answers as the model does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import stagepack
from stagepack.capture.program_run import InterpretedProgram
from stagepack.errors import AnswerDiffersError, ExportWarning, StageFailedError, UnsupportedError
from stagepack_loaders.example import replay_example
from tests.laws.function_model import Calls
from tests.modules import module_of


def decomposed(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, tuple(tensor.clone() for tensor in inputs)).run_decompositions()


def norm(kind: str, dimensions: int) -> torch.nn.Module:
    options = {} if kind == "BatchNorm" else {"track_running_stats": True, "affine": True}
    return getattr(torch.nn, f"{kind}{dimensions}d")(4, **options).eval()


def scaled_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)


def of_list(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values.tolist()) * 2


# Models, with their inputs, whose operators need strides, have results of other shapes on `meta`, or are of no table.
LOADED: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
    **{
        f"{kind}{dimensions}d, decomposed": (norm(kind, dimensions), (torch.rand(2, 4, *([5] * dimensions)),))
        for kind in ("BatchNorm", "InstanceNorm")
        for dimensions in (1, 2, 3)
    },
    **{
        f"LayerNorm of {dtype}, decomposed": (torch.nn.LayerNorm(4, dtype=dtype), (torch.rand(2, 4, dtype=dtype),))
        for dtype in (torch.bfloat16, torch.float16)
    },
    "scaled_mm": (Calls(scaled_product), tuple(torch.eye(16).to(torch.float8_e4m3fn) for _ in range(2))),
    "as_strided": (Calls(lambda x: (x * 2)[1:].as_strided((2, 2), (3, 1), 0)), (torch.arange(12.0).reshape(4, 3),)),
    "list of integers": (Calls(of_list), (torch.arange(3),)),
    "list of floats": (Calls(of_list), (torch.rand(3),)),
    "list of booleans": (Calls(of_list), (torch.tensor([[True, False]]),)),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_model_that_is_exported_is_loaded_by_default(name: str, tmp_path: Path) -> None:
    model, inputs = LOADED[name]
    is_program = name.endswith("decomposed")
    source, args = (decomposed(model, *inputs), ()) if is_program else (model, inputs)
    bundle = stagepack.export(source, args, out=tmp_path / "m.stagepack")
    assert torch.equal(stagepack.load(bundle)(*inputs), model(*inputs))


def inside(function: Callable[..., Any]) -> torch.nn.Module:
    return module_of(lambda self, *inputs: self.inner(*inputs), inner=Calls(function))


RESHAPED: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("t_", lambda x: x.t_() * 2, (torch.rand(3, 2),)),
    ("transpose_", lambda x: x.transpose_(0, 1) * 2, (torch.rand(3, 2),)),
    ("squeeze_", lambda x: x.squeeze_(0) * 2, (torch.rand(1, 2),)),
    ("resize_", lambda x: torch.ops.aten.resize_.default(x, (5,)) * 2, (torch.rand(6),)),
    ("add.out", lambda x, y: torch.add(x, x, out=y) * 2, (torch.rand(3), torch.empty(0))),
]


@pytest.mark.parametrize(("operator", "function", "inputs"), RESHAPED, ids=[name for name, _, _ in RESHAPED])
def test_an_input_that_is_reshaped_in_place_is_refused_by_module_and_line(
    operator: str, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    message = rf"aten\.{re.escape(operator)}.* changes the shape .*run_decompositions.*\(inner: .*function_model\.py, line \d+"
    with pytest.raises(UnsupportedError, match=message):
        stagepack.export(inside(function), tuple(tensor.clone() for tensor in inputs), out=tmp_path / "m.stagepack")
    assert list(tmp_path.iterdir()) == []


def test_a_denied_operator_is_refused_by_module_and_line(tmp_path: Path) -> None:
    def share_storage(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(0)
        torch.ops.aten.set_.source_Tensor(y, x)
        return y * 2

    says = r"aten\.set_.* is not allowed .*\(inner: .*function_model\.py, line \d+"
    with pytest.raises(UnsupportedError, match=says):
        stagepack.export(inside(share_storage), (torch.rand(3),), out=tmp_path / "m.stagepack")


@pytest.mark.parametrize(
    "function",
    [torch.inverse, lambda x: torch.linalg.lu_factor(x)[0], torch.linalg.cholesky],
    ids=["inverse", "lu", "cholesky"],
)
def test_calls_that_torch_orders_by_tokens_answer_and_fail_as_the_model(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    x = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    program = decomposed(Calls(function), x)
    bundle = stagepack.export(program, out=tmp_path / "m.stagepack")
    pipeline = stagepack.load(bundle)
    assert torch.equal(pipeline(x), function(x))
    with pytest.raises(StageFailedError):
        pipeline(torch.zeros(2, 2))
    assert all(
        "with_effects" not in str(user)
        for node in program.graph.nodes
        for user in node.users
        if user not in program.graph.nodes
    )


def padded_encoder() -> tuple[torch.nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    return model, torch.randn(2, 5, 16), {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}


class Detached(torch.nn.Module):
    """Changes a tensor in a way that the trace does not see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + (1.0 if torch.compiler.is_exporting() else 2.0)


def with_detached() -> torch.nn.Module:
    return module_of(lambda self, x: self.second(self.first(x)), first=torch.nn.Linear(3, 3), second=Detached())


def test_a_capture_that_differs_from_the_model_is_refused_by_its_module(tmp_path: Path) -> None:
    with pytest.raises(AnswerDiffersError, match=r"by 1, first in second \(Detached\).*allow_difference=True"):
        stagepack.export(with_detached(), (torch.rand(2, 3),), out=tmp_path / "m.stagepack", stages=2)
    assert list(tmp_path.iterdir()) == []


def test_a_difference_that_is_allowed_is_recorded_as_the_stages_answer(tmp_path: Path) -> None:
    x = torch.rand(2, 3)
    model = with_detached()
    with pytest.warns(ExportWarning, match=r"first in second \(Detached\)"):
        bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", stages=2, allow_difference=True)
    bundle.verify()
    pipeline = stagepack.load(bundle)
    assert replay_example(pipeline).largest == 0.0
    assert torch.equal(pipeline(x), model.get_submodule("first")(x) * 2 + 1.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_fast_path_of_eager_mode_is_refused_by_its_layer(tmp_path: Path) -> None:
    model, x, options = padded_encoder()
    says = r"first in layers\.0 \(TransformerEncoderLayer\).*set_fastpath_enabled"
    with pytest.raises(AnswerDiffersError, match=says):
        stagepack.export(model, (x,), options, out=tmp_path / "m.stagepack")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        bundle = stagepack.export(model, (x,), options, out=tmp_path / "m.stagepack")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert replay_example(stagepack.load(bundle)).largest == 0.0


def masked(*mask: bool) -> torch.nn.Module:
    """Returns as many columns as its buffer has ones."""
    held = {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4), "mask": torch.tensor(mask)}
    return module_of(lambda self, x: self.second(self.first(x))[:, self.mask], **held)


def test_new_weights_that_decide_a_size_get_an_example_of_their_own(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    tuned = masked(True, True, True, False)
    old = stagepack.export(masked(True, False, True, False), (x,), out=tmp_path / "old.stagepack", stages=2)
    save_file(tuned.state_dict(), tmp_path / "tuned.safetensors")
    bundle = stagepack.export(tmp_path / "tuned.safetensors", graph_from=old, out=tmp_path / "new.stagepack")
    bundle.verify()
    pipeline = stagepack.load(bundle)
    assert torch.equal(pipeline(x), tuned(x))
    assert replay_example(pipeline).largest == 0.0
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_program_is_interpreted_without_code_of_its_names() -> None:
    def run(self: torch.nn.Module, x: torch.Tensor, flag: bool = True) -> list[torch.Tensor]:
        for name in ("class", "for", "None"):
            x = self.get_submodule(name)(x)
        return [x, x.relu()]

    model = module_of(run, **{name: torch.nn.Linear(3, 3) for name in ("class", "for", "None")})
    x = torch.rand(2, 3)
    program = torch.export.export(model, (x,))
    assert all(map(torch.equal, InterpretedProgram(program)(x), model(x)))
    buffered = torch.nn.BatchNorm1d(3)
    functional = decomposed(buffered, x)
    before = buffered.running_mean.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        (answer,) = InterpretedProgram(functional)(x)
        assert torch.equal(answer, torch.nn.BatchNorm1d(3)(x))
    assert torch.equal(buffered.running_mean, before)  # type: ignore[arg-type]


def test_random_numbers_in_the_order_of_an_input_in_memory_are_no_difference(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bundle = stagepack.export(torch.nn.Dropout(0.5), (x,), out=tmp_path / "m.stagepack")
    assert replay_example(stagepack.load(bundle)).largest == 0.0


class Counting(torch.nn.Module):
    """A model whose answers depend on its calls so far, by an attribute that is no buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.last = kind, 0, ""
        self.seen: list[int] = []
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.kind == "number":
            self.calls += 1
            return y * self.calls
        if self.kind == "list":
            self.seen.append(x.shape[0])
            return y + sum(self.seen)
        self.last = "called"
        self.seen = [x.shape[0]]
        return y


@pytest.mark.parametrize(("kind", "attribute"), [("number", "calls"), ("list", "seen")])
def test_a_model_that_counts_its_calls_is_refused(kind: str, attribute: str, tmp_path: Path) -> None:
    model, x = Counting(kind), torch.randn(2, 4)
    says = f"Counting: a second call answers the example otherwise than the first: a call changes {attribute}, .*register_buffer"
    with pytest.raises(AnswerDiffersError, match=says):
        stagepack.export(model, (x,), out=tmp_path / "m.stagepack")
    assert (model.calls, model.seen) == (0, [])
    with pytest.warns(ExportWarning, match=f"a call changes {attribute}"):
        stagepack.export(model, (x,), out=tmp_path / "m.stagepack", allow_difference=True)


def test_attributes_that_change_no_answer_are_left_alone(tmp_path: Path) -> None:
    model, x = Counting("note"), torch.randn(2, 4)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack")
    assert torch.equal(stagepack.load(bundle)(x), model(x))
