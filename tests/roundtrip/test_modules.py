"""`load_stage(..., modules=True)`: the modules of the original model, each called on its own, and replaced."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagepack
from stagepack.errors import InputError
from stagepack.exporter import capture_source, export_capture
from stagepack.format.reader import Bundle
from stagepack.where import Where
from stagepack_loaders.pipeline import Pipeline
from tests.zoo.called import calls_of, is_equal
from tests.zoo.case import Case, answers, assert_equal, captured_answers
from tests.zoo.cases import named

MODELS = named("decoders-llama", "encoders-bert", "encoders-albert", "vision-resnet")


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@torch.no_grad()
def test_every_module_answers_as_in_the_model(case: Case, stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = case.build()
    if "attention_mask" in inputs.kwargs:  # with nothing masked, transformers makes no mask, but in an export it does
        inputs.kwargs["attention_mask"][:, :2] = 0
    elif case.name == "decoders-llama":
        model.set_attn_implementation("eager")  # makes one always
    capture = capture_source(model, inputs)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", where=Where(stages=stages))
    loaded = [
        stagepack.load_stage(bundle, number, modules=True, types=case.classes()) for number in range(len(bundle.stages))
    ]
    calls = calls_of(model, *inputs.args, **inputs.kwargs)
    names_of_all = {call.name for call in calls}
    whole = {call.name for call in calls if call.made}
    found = [{name for name, module in stage.named_modules() if type(module).__name__ == "Module"} for stage in loaded]
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
    pipe = Pipeline(bundle.manifest, loaded, case.classes())
    assert_equal(answers(pipe, [inputs]), captured_answers(capture, [inputs]))


class Twice(nn.Module):
    """It calls one module twice with the same graph, another one with two graphs, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.scale(self.block(self.block(x)), times=2), times=3)


class Scale(nn.Module):
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
def test_a_module_called_twice_is_one_module(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    assert [name for name, _ in stage.named_modules()] == [
        "",
        "block",
        "block.0",
        "block.1",
        "scale",
        "scale@1",
    ]
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
def test_a_module_is_replaced_by_another_one(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    own = nn.Linear(4, 4)
    stage.block[0] = model.block[0] = own
    assert torch.equal(stage(x)[0], model(x))
    stage.block = model.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())  # for both calls
    assert torch.equal(stage(x)[0], model(x))
    stage.scale.weight = model.scale.weight = nn.Parameter(torch.ones(4))  # it is the weight of both graphs
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_hooks_run_and_may_change_what_a_module_gives(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    seen: list[torch.Tensor] = []
    for run in (model, stage):
        run.block.register_forward_hook(lambda _, args, result: seen.append(args[0]) or result * 2)
    assert torch.equal(stage(x)[0], model(x))
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[2])


@torch.no_grad()
def test_a_module_of_the_users_may_call_the_one_it_replaces(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) + 1
            return result

    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    stage.block, model.block = Around(stage.block), Around(model.block)  # type: ignore[assignment]
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_a_copy_of_a_stage_stands_on_its_own(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    other = copy.deepcopy(stage)
    other.block[0].weight.zero_()
    assert torch.equal(stage(x)[0], model(x))
    assert not torch.equal(other(x)[0], stage(x)[0])


class Leaky(nn.Module):
    """Its modules use and give more than their arguments and results tell."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()
        self.user = User(self)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.keeper(x)
        return self.user(y) + self.keeper.kept, *self.pair(x, x)


class Keeper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 3
        return x + 1


class User(nn.Module):
    def __init__(self, outer: Leaky) -> None:
        super().__init__()
        self.outer = [outer]

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.outer[0].keeper.kept


class Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a * b, a - b]


@torch.no_grad()
def test_what_goes_around_the_arguments_is_told(tmp_path: Path) -> None:
    model, x = Leaky(), torch.randn(4)
    stage = stagepack.load_stage(stagepack.export(model, (x,), out=tmp_path / "m.stagepack"), 0, modules=True)
    assert is_equal(stage(x), model(x))
    assert torch.equal(stage.keeper(x), x + 1)
    with pytest.raises(InputError, match=r"user uses mul_0, which its arguments do not give"):
        stage.user(x)
    with pytest.raises(InputError, match=r"b was the same as a at export"):
        stage.pair(x, x + 1)
    with pytest.raises(InputError, match=r"expected a list, found Tensor"):
        replaced(stage, "pair", lambda a, b: a * b)(x)
    with pytest.raises(InputError, match=r"result of pair\[1\]: dimension 0 is 2, allowed is 4"):
        replaced(stage, "pair", lambda a, b: [a, b[:2]])(x)
    with pytest.raises(InputError, match=r"keeper cannot be replaced: what follows uses mul_0, made inside of it"):
        replaced(stage, "keeper", lambda x: x + 1)(x)


def replaced(stage: nn.Module, name: str, run: Any) -> nn.Module:
    """A copy of a stage with another module in the place of one."""

    class Own(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

    other = copy.deepcopy(stage)
    setattr(other, name, Own())
    return other


@torch.no_grad()
def test_a_module_torn_by_the_cut_is_not_called(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Tanh()), torch.randn(2, 4)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", split_at=["0.1"])
    first, second = (stagepack.load_stage(bundle, number, modules=True) for number in range(2))
    assert torch.equal(second(*first(x))[0], model(x))
    assert torch.equal(second[1](x) if hasattr(second, "__getitem__") else second.get_submodule("1")(x), x.tanh())
    with pytest.raises(InputError, match="does not lie whole in this stage"):
        first.get_submodule("0")(x)
    plain = stagepack.load_stage(bundle, 0)
    with pytest.raises(InputError, match="was not loaded with modules=True"):
        plain.get_submodule("0.0")(x)
    again = stagepack.recut(bundle, out=tmp_path / "1.stagepack")
    assert torch.equal(stagepack.load_stage(again, 0, modules=True).get_submodule("0")(x), model[0](x))


@torch.no_grad()
def test_a_program_that_only_names_its_modules_takes_tensors_one_by_one(tmp_path: Path) -> None:
    model, x = Twice(), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    stage = stagepack.load_stage(stagepack.export(program, out=tmp_path / "m.stagepack"), 0, modules=True)
    assert torch.equal(stage(x)[0], model(x))
    assert torch.equal(stage.scale(x), model.scale(x, times=2))


def test_modules_and_compile_exclude_each_other(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="modules excludes compile"):
        stagepack.load_stage(twice[1], 0, modules=True, compile=True)


def test_gradients_flow(twice: tuple[Twice, Bundle, torch.Tensor]) -> None:
    model, bundle, x = twice
    stage = stagepack.load_stage(bundle, 0, modules=True)
    stage(x)[0].sum().backward()
    model(x).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Mean(nn.Module):
    """It takes a size besides a tensor, and reads one off it; a mask goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanOf()
        self.masked = Masked()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y, mask, times = self.masked(self.mean(x, x.shape[0], x.shape[0]), mask)
        result: torch.Tensor = y * mask * times
        return result


class MeanOf(nn.Module):
    def forward(self, x: torch.Tensor, rows: int, same: int) -> torch.Tensor:
        return x.sum(1, keepdim=True) / rows + x / x.shape[0] + same


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        return x * mask, mask, 1.5


@pytest.fixture
def mean(tmp_path: Path) -> tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]:
    rows = torch.export.Dim("rows", min=1, max=5000)
    model, given = Mean(), (torch.randn(6, 3), torch.randn(6, 1))
    bundle = stagepack.export(model, given, out=tmp_path / "m.stagepack", dynamic_shapes=({0: rows}, {0: rows}))
    return model, stagepack.load_stage(bundle, 0, modules=True), given


@torch.no_grad()
def test_a_wrapper_may_call_with_other_sizes(mean: tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]) -> None:
    class Chunks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, rows: int, same: int) -> torch.Tensor:
            return torch.cat([self.inner(part, rows // 2, same // 2) for part in x.chunk(2)])

    model, stage, given = mean
    model.mean, stage.mean = Chunks(model.mean), Chunks(stage.mean)  # type: ignore[assignment]
    assert torch.equal(stage(*given)[0], model(*given))


@torch.no_grad()
def test_numbers_are_the_same_when_they_are_equal(mean: tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, stage, _ = mean
    x = torch.randn(3000, 3)
    assert torch.equal(stage.mean(x, int("3000"), int("3000")), model.mean(x, 3000, 3000))
    with pytest.raises(InputError, match="same was the same as rows at export"):
        stage.mean(x, 3000, 2999)


@torch.no_grad()
def test_what_a_module_only_passes_on_must_stay(mean: tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]) -> None:
    _, stage, given = mean
    with pytest.raises(InputError, match=r"result of masked\[1\]: expected the very value that was given"):
        replaced(stage, "masked", lambda x, mask: (x * mask, mask * 2, 1.5))(*given)
    with pytest.raises(InputError, match=r"result of masked\[2\] was fixed to 1.5 at export, found 2.5"):
        replaced(stage, "masked", lambda x, mask: (x * mask, mask, 2.5))(*given)
    assert torch.equal(replaced(stage, "masked", lambda x, mask: (x * mask, mask, 1.5))(*given)[0], stage(*given)[0])


class Odd(nn.Module):
    """Modules in another order than their calls, one in a branch, one that does nothing, one called `graph`, one of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))
        self.branch = Branch()
        self.nothing = nn.Identity()
        self.graph = nn.Linear(4, 4)
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        x = self.nothing(self.branch(x))
        result: torch.Tensor = self.graph(x) + self.graph(x[:1]) + self.table()
        return result


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: x * 2, (x,))
        return result


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self) -> torch.Tensor:
        self.doubled = self.weight * 2
        return self.weight


@torch.no_grad()
def test_modules_stand_as_in_the_model_and_only_called_ones_are_replaced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(3, 4)
    stage = stagepack.load_stage(stagepack.export(model, (x,), out=tmp_path / "m.stagepack"), 0, modules=True)
    assert torch.equal(stage(x)[0], model(x))
    assert [name for name, _ in stage.blocks.named_children()] == list(map(str, range(11)))
    y = z = x
    for ours, theirs in zip(stage.blocks, model.blocks, strict=True):
        y, z = ours(y), theirs(z)
    assert torch.equal(y, z)
    assert torch.equal(stage["graph"](x[:1]), model.graph(x[:1]))  # called with both sizes
    assert torch.equal(stage["graph"](x), model.graph(x))
    assert torch.equal(stage.table(), model.table.weight)
    with pytest.raises(InputError, match=r"result of table: expected the very value that was given"):
        replaced(stage, "table", lambda: torch.zeros(4))(x)
    for owner, name in ((stage, "nothing"), (stage.branch, "one"), (stage.branch, "two"), (stage, "blocks")):
        with pytest.raises(InputError, match=f"the stage would not call what stands at '{name}'"):
            setattr(owner, name, nn.Linear(4, 4))
    with pytest.raises(KeyError, match="there is no module '11' here, but 0, 1, 2"):
        stage.blocks[11]
    stage.graph = model.graph = nn.Linear(4, 4)
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_a_replacement_must_fit_what_it_was_given(mean: tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]) -> None:
    _, stage, given = mean
    with pytest.raises(InputError, match="result of mean: dimension 0 is 1, but 'rows' is 6"):
        replaced(stage, "mean", lambda x, rows, same: x.mean(0, keepdim=True))(*given)
