"""Commands and calls of a user with a device: `load`, `profile`, `recut`, `doctor`; what `nn.Module` has; arrays of other libraries."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from tests.gpu.answers import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("commands")]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).eval()


@pytest.fixture(scope="module")
def bundle(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Four layers in two stages, for some rows."""
    out = tmp_path_factory.mktemp("net") / "net.stagepack"
    return stagepack.export(model, inputs="input=float32[rows=1..64,32]", out=out, stages=2)


def run(*arguments: object) -> str:
    """The output of a command that succeeds."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_load_runs_the_example(bundle: Bundle, device: torch.device, tmp_path: Path) -> None:
    command, out, trace = ("load", bundle.path, "--device", device), tmp_path / "out", tmp_path / "trace.json"
    assert json.loads(run(*command, "--json"))["difference"] < 1e-3
    run(*command, "--inputs", bundle.path / "example.safetensors", "--outputs", out)
    assert out.stat().st_size > 0
    run(*command, "--stage", 1)
    run(*command, "--trace", trace)
    assert json.loads(trace.read_text())


def test_profiles_of_the_device_cut_a_bundle(bundle: Bundle, device: torch.device, tmp_path: Path) -> None:
    times, out = tmp_path / "times.json", tmp_path / "cut.stagepack"
    run("profile", bundle.path, "-o", times, "--device", device, "--runs", 3)
    run("recut", bundle.path, "-o", out, "--stages", 3, "--profile", times)
    assert len(stagepack.open(out).stages) == 3


def test_doctor_names_the_device(device: torch.device) -> None:
    assert ("cuda:0" if device.type == "cuda" else "cpu") in run("doctor")


@torch.no_grad()
def test_a_device_is_said_in_the_ways_of_torch(bundle: Bundle, model: torch.nn.Module, device: torch.device) -> None:
    x = torch.randn(3, 32)
    expected = model(x)
    for given in (device, str(device), device.type, [device]):
        pipeline = stagepack.load(bundle, devices=given)
        assert pipeline(x).device.type == device.type
        assert_close(pipeline(x), expected)
    assert_close(stagepack.load(bundle, device=device.type)(x), expected)
    copied = copy.deepcopy(stagepack.load(bundle, device=device))
    assert copied.devices == (str(device),) * 2
    assert_close(copied(x.to(device)), expected)
    stage: Any = stagepack.load_stage(bundle, 1, device=device)
    assert_close(stage(stagepack.load_stage(bundle, 0, device=device)(x)[0])[0], expected)


@torch.no_grad()
def test_arrays_of_other_libraries_on_the_device(bundle: Bundle, model: torch.nn.Module, cuda: torch.device) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)
    x = torch.randn(3, 32)
    pipeline, array = stagepack.load(bundle, [str(cuda)]), cupy.asarray(x.numpy())
    with pytest.raises(InputError, match=r"found cupy\.ndarray: torch\.from_dlpack makes a tensor of it"):
        pipeline(array)
    found = cupy.from_dlpack(pipeline(torch.utils.dlpack.from_dlpack(array)))
    assert_close(torch.as_tensor(cupy.asnumpy(found)), model(x))
