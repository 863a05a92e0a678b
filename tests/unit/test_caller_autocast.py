"""`torch.autocast` around the calls of a loaded bundle: each value has the dtype that the graph states."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack


class Mixed(torch.nn.Module):
    """Two linear layers, one of them in an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = self.second(hidden)
        return hidden @ hidden.T, answer


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("autocast") / "mixed.stagepack"
    stagepack.export(Mixed().eval(), (torch.randn(2, 8),), out=path, stages=2)
    return path


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"stream": True}, {"device_memory": "1GiB"}),
        *(pytest.param({"compile": kind}, marks=pytest.mark.process) for kind in ("regions", "whole")),
    ],
    ids=str,
)
def test_a_pipeline_answers_as_outside_of_autocast(mixed: Path, options: dict[str, Any]) -> None:
    x = torch.randn(2, 8)
    expected = stagepack.load(mixed, **options)(x)
    assert [tensor.dtype for tensor in expected] == [torch.float32, torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loaded_inside = stagepack.load(mixed, **options)
        for pipeline in (loaded_inside, stagepack.load(mixed, **options)):
            assert all(map(torch.equal, pipeline(x), expected))
        assert torch.is_autocast_enabled("cpu")


def test_a_stage_and_its_gradients_are_as_outside_of_autocast(mixed: Path) -> None:
    x = torch.randn(2, 8)

    def answer_and_gradient(*, autocast: bool) -> list[torch.Tensor]:
        stage = stagepack.load_stage(mixed, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (hidden, *_) = stage(x)
        # Outside, as torch advises: autocast reaches the operators of the backward pass too.
        return [hidden, *torch.autograd.grad(hidden.float().sum(), list(stage.parameters()))]

    assert all(map(torch.equal, answer_and_gradient(autocast=True), answer_and_gradient(autocast=False)))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_stage_that_the_caller_compiles_is_as_outside_of_autocast(mixed: Path) -> None:
    x = torch.randn(2, 8)
    expected = stagepack.load_stage(mixed, 0)(x)
    compiled = torch.compile(stagepack.load_stage(mixed, 0), backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, compiled(x), expected))
