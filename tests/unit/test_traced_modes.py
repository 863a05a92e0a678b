"""Grad modes that torch loses are in bundles, and functions whose backward it loses are named."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import stagepack
from stagepack.errors import ExportWarning


@pytest.fixture(autouse=True)
def _seed() -> None:
    """In some draws, `Clip` clips all values, and no gradient is left."""
    torch.manual_seed(0)


class Clip(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


@torch.library.custom_op("traced_modes::clip", mutates_args=())
def clip(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-0.5, 0.5)


clip.register_fake(torch.empty_like)
clip.register_autograd(lambda _, gradient: gradient * 2)


class Model(torch.nn.Module):
    """Two layers with something between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.between(self.first(x)))
        return result


def gradients_of_bundle_and_model(model: torch.nn.Module, folder: Path) -> list[dict[str, torch.Tensor | None]]:
    x = torch.randn(2, 4)
    bundle = stagepack.export(model, (x,), out=folder / "m.stagepack")
    namespaces = {namespace for stage in bundle.stages for namespace in stage.namespaces}
    stage: Any = stagepack.load_stage(bundle, 0, allow_ops=namespaces)
    gradients = []
    for module in (stage, model):
        result = module(x)
        torch.as_tensor(result[0] if isinstance(result, tuple) else result).square().sum().backward()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    return gradients


def autocast_without_gradients(x: torch.Tensor) -> torch.Tensor:
    """Half of the result has a gradient."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            half = x @ x.T
        return (half @ x).float() + x.square()


def gradients_inside(x: torch.Tensor) -> torch.Tensor:
    """The last operator in autocast has no gradient."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.enable_grad():
            half = (x @ x.T).float()
        other = half @ x
    return half @ x + other.float()


@pytest.mark.parametrize("between", [autocast_without_gradients, gradients_inside, clip])
def test_gradients_are_those_of_the_model(between: Any, tmp_path: Path) -> None:
    found, expected = gradients_of_bundle_and_model(Model(between), tmp_path)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_functions_whose_backward_is_lost_are_named(tmp_path: Path) -> None:
    says = r"Model calls Clip, in the model itself: .* drops its backward.*register_autograd"
    with pytest.warns(ExportWarning, match=says):
        found, expected = gradients_of_bundle_and_model(Model(Clip.apply), tmp_path)
    # The gradient of forward, and not that of backward.
    assert found["second.weight"] is not None
    torch.testing.assert_close(found["second.weight"], expected["second.weight"])
    assert found["first.weight"] is not None
    assert found["first.weight"].any()
    assert not torch.allclose(found["first.weight"], torch.as_tensor(expected["first.weight"]))


def test_functions_without_gradients_and_those_of_torch_are_not_named(tmp_path: Path) -> None:
    def reentrant(x: torch.Tensor) -> Any:
        # torch warns where no input needs gradients, as in the run of the example.
        return checkpoint(torch.relu, x, use_reentrant=True) if torch.is_grad_enabled() else torch.relu(x)

    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ExportWarning)
        frozen = Model(Clip.apply).requires_grad_(requires_grad=False)
        stagepack.export(frozen, (x,), out=tmp_path / "frozen.stagepack")
        stagepack.export(Model(reentrant), (x,), out=tmp_path / "checkpoint.stagepack")
