"""Three versions of a model as bundles, and the deltas between them."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import stagepack
from tests.made_once import made_once

SIZE = 1024


class Versions(NamedTuple):
    """The folders of the versions and of the deltas; `models` are the state dicts, by version."""

    folder: Path

    @property
    def a(self) -> Path:
        return self.folder / "a.stagepack"

    @property
    def b(self) -> Path:
        return self.folder / "b.stagepack"

    @property
    def c(self) -> Path:
        return self.folder / "c.stagepack"

    @property
    def a_to_b(self) -> Path:
        return self.folder / "b.delta"

    @property
    def b_to_c(self) -> Path:
        return self.folder / "c.delta"

    def model(self, name: str) -> torch.nn.Module:
        model = net()
        model.load_state_dict(torch.load(self.folder / f"{name}.pt", weights_only=True))  # noqa: TID251 - weights only
        return model


class Trainer:
    """Ships each step of a model of two stages as a delta, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.x = torch.ones(1, 4)
        self.first = stagepack.export(self.model, (self.x,), out=folder / "first", stages=2).path
        self._newest = shutil.copytree(self.first, folder / "newest")

    def ship(self) -> Path:
        self.step += 1
        with torch.no_grad():
            self.model.get_parameter(f"{self.step % 2}.weight")[0, 0] = self.step
        delta = stagepack.delta(self._newest, self.model.state_dict(), out=self.folder / f"{self.step}.delta")
        stagepack.apply_deltas(self._newest, [delta], out=self._newest, overwrite=True)
        return delta.path

    def answer(self) -> torch.Tensor:
        answer: torch.Tensor = self.model(self.x)
        return answer


def net() -> torch.nn.Module:
    """A model with a weight of several blocks, small ones, and buffers of other dtypes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, SIZE), torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 3)
    ).bfloat16()
    model.append(torch.nn.BatchNorm1d(3).bfloat16()).append(torch.nn.Linear(3, 3).bfloat16())
    for buffer in model.buffers():
        buffer += 1  # a graph stores no bytes of zeros
    return model.eval()


def replace_some(model: torch.nn.Module, share: float, seed: int) -> None:
    """Replace some elements of all weights, and count a step in the buffer of integers."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            if weight.is_floating_point():
                chosen = torch.rand(weight.shape) < share
                weight[chosen] = torch.randn(int(chosen.sum()), dtype=torch.float32).abs().to(weight.dtype)
            else:
                weight += 1


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    def make(folder: Path) -> None:
        model = net()
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        for seed, name in enumerate("abc"):
            torch.save(model.state_dict(), folder / f"{name}.pt")
            stagepack.export(model, (x,), out=folder / f"{name}.stagepack", stages=3)
            replace_some(model, 0.01, seed)
        stagepack.delta(folder / "a.stagepack", folder / "b.stagepack", out=folder / "b.delta", version="step 1")
        stagepack.delta(folder / "b.stagepack", folder / "c.stagepack", out=folder / "c.delta", version="step 2")

    return Versions(made_once(tmp_path_factory, "versions", make))
