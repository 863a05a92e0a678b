"""Compiled stages on a GPU: by regions, whole, and ahead of time by the command."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import CompiledError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Compile
from tests.gpu.answers import assert_close
from tests.unit.test_compile import Stack, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("compiled")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stack, Bundle]:
    """The model, and its bundle of two stages with four blocks each."""
    torch.manual_seed(0)
    model = Stack().eval()
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    out = tmp_path_factory.mktemp("stack") / "stack.stagepack"
    shapes = {"x": {0: batch, 1: length}}
    return model, stagepack.export(
        model, (torch.randn(2, 3, 8),), out=out, split_at=["blocks.4"], dynamic_shapes=shapes
    )


@torch.no_grad()
@pytest.mark.parametrize("mode", [True, "whole"], ids=str)
def test_stages_are_compiled_at_the_first_call(
    stack: tuple[Stack, Bundle], mode: Compile, device: torch.device
) -> None:
    torch.compiler.reset()
    pipeline = stagepack.load(stack[1], [str(device)], compile=mode)
    model = stack[0].to(device)
    for x in inputs()[:2]:
        assert_close(pipeline(x.to(device)), model(x.to(device)))


@torch.no_grad()
def test_the_command_compiles_for_the_device(stack: tuple[Stack, Bundle], device: torch.device, tmp_path: Path) -> None:
    model, bundle = stack
    out = str(tmp_path / "compiled")
    done = CliRunner().invoke(
        main, ["compile", str(bundle.path), "-o", out, "--device", str(device)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "1 of 1 units" in done.output
    target = json.loads((tmp_path / "compiled" / "compiled.json").read_text())["target"]
    assert target["device"] == device.type
    pipeline, model = stagepack.load(bundle, [str(device)], compiled=out), model.to(device)
    for x in inputs():
        assert_close(pipeline(x.to(device)), model(x.to(device)))
    if device.type == "cuda":
        assert target["arch"] == "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        with pytest.raises(CompiledError, match="was compiled for cuda"):
            stagepack.load(bundle, ["cpu"], compiled=out)
    loaded = CliRunner().invoke(
        main,
        ["load", str(bundle.path), "--device", str(device), "--compiled", out, "--json"],
        catch_exceptions=False,
    )
    assert json.loads(loaded.output)["difference"] < 1e-3
