"""Stages in processes that share a GPU: answers, state, generation, and what a command says of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from tests.gpu.answers import assert_close
from tests.gpu.test_gpu_text import GREEDY, POSITIONS, ROWS, llama, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("processes")]


class Layers(torch.nn.Module):
    """Three layers and a counter; the input is read by the first and the last one."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(256, 256) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.middle(self.first(x).relu()).relu()
        self.count.add_(1)
        return self.last(y + x), self.count + 0


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The layers in three stages, for some rows."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("layers") / "m.stagepack"
    return stagepack.export(Layers().eval(), inputs="x=float32[rows=1..4096,256]", out=out, split_at=["middle", "last"])


@pytest.fixture(scope="module")
def in_processes(layers: Bundle, pytestconfig: pytest.Config) -> Iterator[Any]:
    """The layers in two processes on one device."""
    with stagepack.load(layers, [pytestconfig.getoption("--gpu-device")], processes=2) as pipeline:
        yield pipeline


@torch.no_grad()
def test_processes_answer_as_one(layers: Bundle, in_processes: Any, device: torch.device) -> None:
    one = stagepack.load(layers, [str(device)])
    assert in_processes.devices == (str(device),) * 3
    for rows in (1, 7, 4096):
        x = torch.randn(rows, 256)
        for given in (x, x.to(device)):
            found, expected = in_processes(given), one(given)
            assert all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in zip(found, expected, strict=True))


@torch.no_grad()
def test_sequences_in_processes_have_state_of_their_own(in_processes: Any, device: torch.device) -> None:
    x = torch.randn(2, 256, device=device)
    in_processes.reset_state()
    with in_processes.sequence() as first, in_processes.sequence() as second:
        for count in (1, 2, 3):
            assert first(x)[1] == count
            assert second(x)[1] == count


@torch.no_grad()
def test_microbatches_in_processes_are_one_batch(in_processes: Any, device: torch.device) -> None:
    batches = [torch.randn(5, 256) for _ in range(6)]
    in_processes.reset_state()
    futures = [in_processes.submit(x) for x in batches]
    found = [future.result()[0].cpu() for future in futures]
    in_processes.reset_state()
    for x, answer in zip(batches, found, strict=True):
        assert_close(answer, in_processes(x)[0])


@torch.no_grad()
def test_tokens_in_processes_are_those_of_transformers(device: torch.device, tmp_path: Path) -> None:
    made = stagepack.export(llama(), out=tmp_path / "m", stages=2, generate=POSITIONS, generate_batch=ROWS)
    tokens, mask = prompts()
    expected = llama().to(device).generate(tokens.to(device), attention_mask=mask.to(device), **GREEDY)
    with stagepack.load(made, [str(device)], processes=2) as pipeline:
        found = pipeline.generate(tokens, attention_mask=mask, **GREEDY)
    assert torch.equal(found.cpu(), expected.cpu())
