"""What crosses between stages keeps its gradient, and its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import MicrobatchWarning
from tests.train.models import assert_step

pytestmark = pytest.mark.usefixtures("one_process")


class WritesAView(torch.nn.Module):
    """The value that crosses is computed of memory that was written through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(2, 4)
        hidden[:, :2] = self.first(x)[:, :2]
        return self.second(hidden * 2)


def test_gradients_of_what_is_written_into_a_view(tmp_path: Path) -> None:
    model, x = WritesAView(), torch.randn(2, 4)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", split_at=["second"])
    training = stagepack.train(bundle, mean_of_squares, microbatches=1, schedule="looped-bfs")
    assert_step(training, model, mean_of_squares, ((x,), None), (1e-6, 0), (1.3e-6, 1e-5))


def mean_of_squares(result: torch.Tensor, _: Any) -> torch.Tensor:
    return result.square().mean()


class Counts(torch.nn.Module):
    """A buffer that each call writes crosses, and is a result."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        return self.second(self.first(x)) + self.count, self.count


def test_a_microbatch_gets_the_buffer_that_its_own_call_has_written(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    bundle = stagepack.export(Counts(), (x,), out=tmp_path / "m.stagepack", split_at=["second"])
    counts = []

    def loss(result: tuple[torch.Tensor, torch.Tensor], _: object) -> torch.Tensor:
        counts.append(result[1][0, 0].item())
        return result[0].mean()

    with pytest.warns(MicrobatchWarning, match="by their position in the batch"):
        training = stagepack.train(
            bundle, loss, microbatches=3, schedule="looped-bfs", batch_dim=0, loss_reduction="mean"
        )
    training.step(torch.randn(6, 4))
    assert counts == [1, 2, 3]


class EncodesAndDecodes(torch.nn.Module):
    """Two functions that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.shared, self.decoder = (torch.nn.Linear(4, 4) for _ in range(3))

    def encode(self, x: torch.Tensor) -> Any:
        return self.shared(self.encoder(x).relu())

    def decode(self, x: torch.Tensor) -> Any:
        return self.decoder(self.shared(x).relu())


def test_one_of_several_entry_points_is_trained(tmp_path: Path) -> None:
    model, x = EncodesAndDecodes(), torch.randn(2, 4)
    inputs = {name: stagepack.Inputs(args=(x,)) for name in ("encode", "decode")}
    stagepack.export(model, out=tmp_path / "m.stagepack", entry_points=inputs, stages=2)
    training = stagepack.train(
        f"{tmp_path / 'm.stagepack'}#decode", lambda result, _: result.mean(), microbatches=1, schedule="looped-bfs"
    )
    training.step(x)
    with torch.no_grad():
        for parameter in (*training.parameters(), *model.shared.parameters(), *model.decoder.parameters()):
            parameter.add_(1)
        saved = stagepack.save(training, out=tmp_path / "trained.stagepack")
        # The layer that only the other function has is as it was.
        assert torch.equal(stagepack.load(saved.select("encode"))(x), model.encode(x))
        assert torch.equal(stagepack.load(saved.select("decode"))(x), model.decode(x))
