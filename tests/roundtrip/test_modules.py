"""`load_stage(..., modules=True)`: the modules of the original model, each called on its own, and replaced."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagepack
from stagepack.capture.source import capture_model
from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.local_pipeline import Pipeline
from tests.zoo.called import calls_of, is_equal
from tests.zoo.case import Case, answers, assert_equal, captured_answers
from tests.zoo.cases import named

MODELS = named("decoders-llama", "encoders-bert", "encoders-albert", "vision-resnet")


# One model in several stages, another one in one; modules that are called twice have tests of their own.
QUICK = {("decoders-llama", 3), ("vision-resnet", 1)}


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        pytest.param(
            case, stages, marks=() if (case.name, stages) in QUICK else pytest.mark.slow, id=f"{case.name}-{stages}"
        )
        for case in MODELS
        for stages in (1, 3)
    ],
)
@torch.no_grad()
def test_every_module_answers_as_in_the_model(case: Case, stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any
    model, inputs = case.build()
    if "attention_mask" in inputs.kwargs:  # with nothing masked, transformers makes no mask, but in an export it does
        inputs.kwargs["attention_mask"][:, :2] = 0
    elif case.name == "decoders-llama":
        model.set_attn_implementation("eager")  # makes one always
    capture = capture_model(model, inputs)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=stages))
    loaded = [
        stagepack.load_stage(bundle, number, modules=True, types=case.classes()) for number in range(len(bundle.stages))
    ]
    calls = calls_of(model, *inputs.args, **inputs.kwargs)
    names_of_all = {call.name for call in calls}
    whole = {call.name for call in calls if call.made}
    found = [
        {name for name, module in stage.named_modules() if type(module).__name__ == "CalledModule"} for stage in loaded
    ]
    if stages == 1:
        assert whole <= found[0] <= names_of_all
    else:
        assert set().union(*found) < names_of_all
        assert all(len(names) > 3 for names in found)
    asked = 0
    for stage, names in zip(loaded, found, strict=True):
        seen: set[str] = set()
        for call in calls:
            if call.name in names and call.name not in seen:
                seen.add(call.name)
                assert is_equal(stage.get_submodule(call.name)(*call.args, **call.kwargs), call.result), call.name
                asked += 1
    assert asked >= len(set().union(*found))
    shapes = {name: tensor.shape for stage in loaded for name, tensor in stage.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}
    pipe = Pipeline(bundle, loaded, case.classes())
    assert_equal(answers(pipe, [inputs]), captured_answers(capture, [inputs]))


class Twice(nn.Module):
    """Calls one module twice with the same graph, another one with two graphs, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.scale(self.block(self.block(x)), times=2), times=3)


class Scale(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        self.count.add_(1)
        for _ in range(times):
            x = x * self.weight
        return x


@pytest.fixture
def twice(tmp_path: Path) -> tuple[Twice, Bundle, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    return model, stagepack.export(model, (x,), out=tmp_path / "m.stagepack", dynamic_shapes=shapes), x


@torch.no_grad()
def test_a_module_called_twice_is_one_module(twice: tuple[Any, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage: Any = stagepack.load_stage(bundle, 0, modules=True)
    assert [name for name, _ in stage.named_modules()] == ["", "block", "block.0", "block.1", "scale", "scale@1"]
    [found] = stage(x)
    assert torch.equal(found, model(x))
    assert stage.state_dict()["scale.count"] == model.scale.count == 2
    assert torch.equal(stage.block(x), model.block(x))
    assert torch.equal(stage.scale(x, times=2), model.scale(x, times=2))
    assert torch.equal(stage.get_submodule("scale@1")(x, times=3), model.scale(x, times=3))
    assert stage.state_dict()["scale.count"] == model.scale.count == 4
    with pytest.raises(InputError, match="times was fixed to 2 at export, found 3"):
        stage.scale(x, times=3)
    stage.reset_state()
    assert stage.state_dict()["scale.count"] == 0


@torch.no_grad()
def test_a_module_is_replaced_by_another_one(twice: tuple[Any, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage: Any = stagepack.load_stage(bundle, 0, modules=True)
    own = nn.Linear(4, 4)
    stage.block[0] = model.block[0] = own
    assert torch.equal(stage(x)[0], model(x))
    stage.block = model.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())  # for both calls
    assert torch.equal(stage(x)[0], model(x))
    stage.scale.weight = model.scale.weight = nn.Parameter(torch.ones(4))  # it is the weight of both graphs
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_hooks_run_and_may_change_what_a_module_gives(twice: tuple[Any, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage: Any = stagepack.load_stage(bundle, 0, modules=True)
    seen: list[torch.Tensor] = []

    def double(_: nn.Module, args: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        seen.append(args[0])
        return result * 2

    for run in (model, stage):
        run.block.register_forward_hook(double)
    assert torch.equal(stage(x)[0], model(x))
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[2])


@torch.no_grad()
def test_a_module_of_the_users_may_call_the_one_it_replaces(twice: tuple[Any, Bundle, torch.Tensor]) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) + 1
            return result

    model, bundle, x = twice
    stage: Any = stagepack.load_stage(bundle, 0, modules=True)
    stage.block, model.block = Around(stage.block), Around(model.block)
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_a_module_torn_by_the_cut_is_not_called(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Tanh()), torch.randn(2, 4)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", split_at=["0.1"])
    first, second = (stagepack.load_stage(bundle, number, modules=True) for number in range(2))
    assert torch.equal(second(*first(x))[0], model(x))
    assert torch.equal(second[1](x) if hasattr(second, "__getitem__") else second.get_submodule("1")(x), x.tanh())
    with pytest.raises(InputError, match="it is not complete in this stage"):
        first.get_submodule("0")(x)
    plain = stagepack.load_stage(bundle, 0)
    with pytest.raises(InputError, match="was loaded without modules=True"):
        plain.get_submodule("0.0")(x)
    again = stagepack.recut(bundle, out=tmp_path / "1.stagepack")
    assert torch.equal(stagepack.load_stage(again, 0, modules=True).get_submodule("0")(x), model[0](x))


@torch.no_grad()
def test_a_program_that_only_names_its_modules_takes_tensors_one_by_one(tmp_path: Path) -> None:
    model, x = Twice(), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    stage: Any = stagepack.load_stage(stagepack.export(program, out=tmp_path / "m.stagepack"), 0, modules=True)
    assert torch.equal(stage(x)[0], model(x))
    assert torch.equal(stage.scale(x), model.scale(x, times=2))


def test_gradients_flow(twice: tuple[Any, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage: Any = stagepack.load_stage(bundle, 0, modules=True)
    stage(x)[0].sum().backward()
    model(x).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
