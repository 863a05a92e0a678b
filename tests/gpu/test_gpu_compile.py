"""Compiled stages on a GPU: by regions, whole, and ahead of time by the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import CompiledError
from stagepack.format.reader import Bundle
from stagepack_loaders.options import Compile
from stagepack_loaders.torch.compilation import compile_ahead
from tests.gpu.answers import assert_close
from tests.gpu.test_gpu_commands import run
from tests.unit.test_compile import Stack, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("compiled")]

SHAPE = "float32[batch=1..64,length=2..64,8]"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stack, Bundle]:
    """The model, and its bundle of two stages with four blocks each."""
    torch.manual_seed(0)
    model = Stack().eval()
    out = tmp_path_factory.mktemp("stack") / "stack.stagepack"
    return model, stagepack.export(model, inputs=f"x={SHAPE}", out=out, split_at=["blocks.4"])


def check_answers(pipeline: Any, model: torch.nn.Module, device: torch.device) -> None:
    model = model.to(device)
    for x in inputs():
        assert_close(pipeline(x.to(device)), model(x.to(device)))


@torch.no_grad()
@pytest.mark.parametrize("mode", [True, "whole"], ids=str)
def test_stages_are_compiled_at_the_first_call(
    stack: tuple[Stack, Bundle], mode: Compile, device: torch.device
) -> None:
    torch.compiler.reset()
    check_answers(stagepack.load(stack[1], [str(device)], compile=mode), stack[0], device)


@torch.no_grad()
def test_the_command_compiles_for_the_device(stack: tuple[Stack, Bundle], device: torch.device, tmp_path: Path) -> None:
    model, bundle = stack
    out = str(tmp_path / "compiled")
    assert "1 of 1 units" in run("compile", bundle.path, "-o", out, "--device", device)
    target = json.loads((tmp_path / "compiled" / "compiled.json").read_text())["target"]
    assert target["device"] == device.type
    check_answers(stagepack.load(bundle, [str(device)], compiled=out), model, device)
    if device.type == "cuda":
        assert target["arch"] == "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        with pytest.raises(CompiledError, match="was compiled for cuda"):
            stagepack.load(bundle, ["cpu"], compiled=out)
    loaded = json.loads(run("load", bundle.path, "--device", device, "--compiled", out, "--json"))
    assert loaded["difference"] < 1e-3


class GroupedAttention(torch.nn.Module):
    """Attention with two query heads for each key head, whose sequence is dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        queries = self.queries(x).view(batch, length, 4, 4).transpose(1, 2)
        keys, values = (
            projection(x).view(batch, length, 2, 4).transpose(1, 2)[:, :, None].expand(batch, 2, 2, length, 4)
            for projection in (self.keys, self.values)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries, keys.reshape(batch, 4, length, 4), values.reshape(batch, 4, length, 4), is_causal=True
        )
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))


@torch.no_grad()
def test_grouped_query_attention_is_compiled_ahead(device: torch.device, tmp_path: Path) -> None:
    """torch 2.11 refuses the ranges of such sizes unless their guards become assertions."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(GroupedAttention() for _ in range(3))).eval()
    bundle = stagepack.export(model, inputs=f"input={SHAPE}", out=tmp_path / "b.stagepack")
    units = compile_ahead(bundle, tmp_path / "compiled", device)
    assert [unit.reason for unit in units] == [""]
    check_answers(stagepack.load(bundle, [str(device)], compiled=tmp_path / "compiled"), model, device)
