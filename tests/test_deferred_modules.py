"""Modules that are made without memory, and whose constructors need more than the shapes of their tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stagepack


class RandomFeatures(torch.nn.Module):
    """A buffer of random numbers that are drawn after those of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding = torch.nn.Linear(16, 16), torch.nn.Embedding(5, 16)
        torch.nn.init.orthogonal_(self.first.weight)
        torch.nn.init.trunc_normal_(self.first.bias)
        self.register_buffer("features", torch.randn(16, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.features + self.embedding.weight[0, :4]


class UsesData(torch.nn.Module):
    """A module that needs the data of its parameter when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.size = float(self.first.weight.detach().numpy().max() > -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.size


class DerivedBuffer(torch.nn.Module):
    """A buffer that is computed from the first content of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.register_buffer("twice", self.first.weight.detach() * 2, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.twice


class DerivedAttribute(torch.nn.Module):
    """A tensor that is computed from the first content of a parameter, and is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.twice = self.first.weight.detach() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.twice


class ParameterInList(torch.nn.Module):
    """A parameter that the module also holds in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.nn.Parameter(torch.randn(16))]
        self.scale = self.held[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held[0] + self.scale


@pytest.mark.parametrize("module_class", [RandomFeatures, UsesData, DerivedBuffer, DerivedAttribute, ParameterInList])
def test_a_module_that_needs_more_than_shapes(module_class: type[torch.nn.Module], tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return module_class()

    torch.manual_seed(1)
    trained = module_class().state_dict()
    save_file(trained, tmp_path / "c.safetensors")
    args = (torch.randn(2, 16),)
    found = stagepack.export(make, args, weights=tmp_path / "c.safetensors", out=tmp_path / "found.stagepack")
    model = make()
    model.load_state_dict(trained)
    assert found.digest == stagepack.export(model, args, out=tmp_path / "expected.stagepack").digest
