"""Names of a model that a loaded stage has too: the two never meet."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.torch_internals import child_modules, weight_tensors
from stagepack_loaders.torch.module_builder import CalledModule
from stagepack_loaders.torch.stage import TorchStage

# What torch's modules keep for themselves; a model that has these names does not work either.
OF_TORCH = set(vars(torch.nn.Module()))
OURS = {name for name in (*dir(TorchStage), *dir(CalledModule)) if not name.startswith("__")}
# Attributes that a stage had once, and names that its code uses.
USED = {
    "_state", "_slots", "_inputs", "_code", "_output_contract", "_called_children", "_wait", "_bodies", "inputs",
    "self",
}  # fmt: skip
WEIGHT_NAMES = sorted((OURS | USED) - OF_TORCH)
# torch finds modules by attribute, so those that its own class has are no names for modules.
MODULE_NAMES = sorted((OURS | USED) - OF_TORCH - set(dir(torch.nn.Module)))


class Named(torch.nn.Module):
    """A module that has something under each of many names, and calls all of it."""

    def __init__(self, names: list[str], kind: str, *, inner: bool = True) -> None:
        super().__init__()
        self.names, self.kind = names, kind
        for index, name in enumerate(names):
            values = torch.linspace(0.5 + inner, 1, 2) / (1 + index)
            if kind == "module":
                child = child_modules(self)[name] = torch.nn.Linear(2, 2, bias=False)
                child.weight.data = torch.outer(values, values)
            elif kind == "parameter":
                weight_tensors(self, parameters=True)[name] = torch.nn.Parameter(values)
            else:
                weight_tensors(self, parameters=False)[name] = values
        self.inside = Named(names, kind, inner=False) if inner else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            if self.kind == "module":
                child: Any = child_modules(self)[name]
                x = x + child(x)
            else:
                x = x + weight_tensors(self, parameters=self.kind == "parameter")[name]
        return x if self.inside is None else torch.tanh(self.inside(x))


def export(kind: str, folder: Path) -> tuple[stagepack.Bundle, torch.nn.Module, torch.Tensor]:
    model = Named(MODULE_NAMES if kind == "module" else WEIGHT_NAMES, kind).eval()
    x = torch.full((1, 2), 0.5)
    return stagepack.export(model, (x,), out=folder / "b.stagepack"), model, x


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
@torch.no_grad()
def test_a_model_may_have_any_name_that_a_stage_has(kind: str, tmp_path: Path) -> None:
    bundle, model, x = export(kind, tmp_path)
    expected = model(x)
    assert torch.equal(stagepack.load(bundle)(x), expected)
    for modules in (False, True):
        stage = stagepack.load_stage(bundle, 0, modules=modules)
        assert torch.equal(stage(x)[0], expected)
        assert stage.state_dict().keys() == model.state_dict().keys()
        for listed in ("named_parameters", "named_buffers", *(["named_modules"] if kind == "module" else [])):
            assert {name for name, _ in getattr(stage, listed)()} == {name for name, _ in getattr(model, listed)()}
        # Each of these writes weights under the names of the model.
        stage.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
        stage.double().float()
        assert torch.equal(stage(x)[0], expected)
        assert torch.equal(copy.deepcopy(stage)(x)[0], expected)


def test_what_a_model_has_under_a_name_of_ours_is_found_by_its_path(tmp_path: Path) -> None:
    bundle, model, _ = export("module", tmp_path)
    stage = stagepack.load_stage(bundle, 0)
    assert stage.get_submodule("inside.run") is child_modules(stage["inside"])["run"]
    assert torch.equal(stage.get_parameter("state.weight"), model.state_dict()["state.weight"])
    (tmp_path / "b.stagepack").rename(tmp_path / "modules.stagepack")
    bundle, model, _ = export("buffer", tmp_path)
    stage = stagepack.load_stage(bundle, 0)
    assert torch.equal(stage.get_buffer("inside.half"), model.state_dict()["inside.half"])
    for find, path in ((stage.get_submodule, "half"), (stage.get_parameter, "half"), (stage.get_buffer, "inside.none")):
        with pytest.raises(AttributeError, match=path):
            find(path)


@torch.no_grad()
def test_a_module_under_a_name_of_ours_can_be_replaced(tmp_path: Path) -> None:
    bundle, model, x = export("module", tmp_path)
    stage = stagepack.load_stage(bundle, 0, modules=True)
    replacement = torch.nn.Linear(2, 2)
    for name in ("device", "_parts", "run"):
        stage[name] = child_modules(model)[name] = replacement
    assert torch.equal(stage(x)[0], model(x))
    assert stage.device == torch.device("cpu")
