"""A runtime that is not part of stagepack: all of it is in `tests/runtimes/numpy_runtime`, and everything works with it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import DeviceError, InputError, OperatorError, OptionError
from stagepack_loaders import example, registry
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.registry import find_runtime, register_runtime, runtime_names
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.scheduler import QueuedCall, Scheduler
from tests.runtimes.numpy_runtime.runtime import NumpyRuntime

ROOT = Path(__file__).parents[2]
X = numpy.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")


class Block(torch.nn.Module):
    """Attention with two heads, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = (self.heads(layer(normed)) for layer in (self.query, self.key, self.value))
        weights = torch.softmax(query @ key.transpose(2, 3) / 2.0, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * 0.5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.ReLU()).eval()
    out: Path = tmp_path_factory.mktemp("numpy") / "m.stagepack"
    shapes = [{0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=64)}]
    stagepack.export(net, (torch.from_numpy(X),), out=out, split_at=["1", "2"], dynamic_shapes=shapes, onnx=True)
    return out


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_runtime(NumpyRuntime())
    yield
    del registry._REGISTRY["numpy"]


def in_torch(bundle: Path, x: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    with torch.no_grad():
        return stagepack.load(bundle)(torch.from_numpy(x)).numpy()


def test_it_is_registered() -> None:
    assert runtime_names()[-1] == "numpy"
    assert find_runtime("numpy").title == "numpy"


@pytest.mark.parametrize("size", [(3, 5), (1, 2), (4, 1)])
def test_a_bundle_runs_in_it_alone(size: tuple[int, int], bundle: Path) -> None:
    x = X[: size[0], : size[1]] if size[0] <= 3 else numpy.resize(X, (*size, 8))
    pipeline = stagepack.load(bundle, runtime="numpy")
    result = pipeline(x)
    assert isinstance(result, numpy.ndarray)
    assert result.dtype == numpy.float32
    assert numpy.allclose(result, in_torch(bundle, x), atol=1e-5)
    assert pipeline.state_dict().keys() == stagepack.load(bundle).state_dict().keys()
    assert len(list(pipeline.parameters())) == len(list(stagepack.load(bundle).parameters()))
    pipeline.reset_state()


@pytest.mark.parametrize(
    "runtimes",
    [
        ["numpy", "torch", "numpy"],
        ["torch", "numpy", "torch"],
        ["onnxruntime", "numpy", "onnxruntime"],
        ["numpy", "onnxruntime", "torch"],
    ],
)
def test_its_stages_work_with_those_of_other_runtimes(runtimes: list[str], bundle: Path) -> None:
    pipeline = stagepack.load(bundle, runtime=runtimes)
    with torch.no_grad():
        from_numpy, from_torch = pipeline(X), pipeline(torch.from_numpy(X))
    assert isinstance(from_numpy, numpy.ndarray)
    assert isinstance(from_torch, torch.Tensor)
    assert numpy.allclose(from_numpy, in_torch(bundle, X), atol=1e-5)
    assert numpy.array_equal(from_torch.numpy(), from_numpy)


def test_a_stage_alone_is_called_with_arrays_of_any_runtime(bundle: Path) -> None:
    stage = stagepack.load_stage(bundle, 0, runtime="numpy")
    (expected,) = stagepack.load_stage(bundle, 0)(torch.from_numpy(X))
    (from_numpy,) = stage(X)
    (from_torch,) = stage(input=torch.from_numpy(X))
    assert numpy.allclose(from_numpy, expected.detach().numpy(), atol=1e-5)
    assert torch.equal(from_torch, torch.from_numpy(from_numpy))
    with pytest.raises(InputError, match="dimension 2: expected 8"):
        stage(X[:, :, :7])


def test_the_server_runs_it(bundle: Path) -> None:
    opened = stagepack.open(bundle)
    for runtimes in ("numpy", ["numpy", "torch", "onnxruntime"]):
        pipeline = stagepack.load(bundle, runtime=runtimes)
        interface = Interface(opened.entry_point)
        scheduler = Scheduler(
            pipeline.executor.overlapping(lambda number, seconds: None),
            interface,
            max_batch_size=1,
            batching_delay=0,
            on_start=lambda _: None,
            on_end=lambda _: None,
        )
        call = QueuedCall(inputs={next(iter(interface.inputs)): X})
        scheduler.submit(call)
        (result,) = call.answer.result(timeout=20).values()
        assert scheduler.close(20)
        assert numpy.allclose(result, in_torch(bundle, X), atol=1e-5)
        assert result.flags.c_contiguous


def test_its_answer_to_the_example_is_within_the_tolerance(bundle: Path) -> None:
    opened = stagepack.open(bundle)
    difference = example.replay_example(stagepack.load(opened, runtime="numpy"))
    assert difference.within
    assert 0 < difference.largest < 1e-5


def test_the_command_knows_it(bundle: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == 0, done.output
        return done.stdout

    assert json.loads(run("verify", str(bundle), "--run", "--runtime", "numpy", "--json"))["ok"]
    facts = json.loads(run("load", str(bundle), "--runtime", "numpy", "--json"))
    assert [stage["runtime"] for stage in facts["stages"]] == ["numpy"] * 3
    assert facts["stages"][0]["files"] == ["stage-0.msgpack", "stage-0.safetensors"]
    out = str(tmp_path / "repository")
    run("triton", str(bundle), "-o", out, "--runtime", "numpy", "--import", "tests.runtimes.numpy_runtime.plugin")
    assert "numpy" in (tmp_path / "repository" / "m_stage_0" / "config.pbtxt").read_text()
    for options, message in [
        (["--compiled", "x"], "--compiled requires the runtime torch for all stages"),
        (["--device", "cuda"], "device 'cuda': numpy runs stages on cpu"),
    ]:
        done = CliRunner().invoke(main, ["load", str(bundle), "--runtime", "numpy", *options])
        assert message in done.stderr


def test_the_option_import_registers_it_first(bundle: Path) -> None:
    code = "from stagepack.cli import main; main()"
    command = [sys.executable, "-c", code, "verify", str(bundle), "--run", "--runtime", "numpy"]
    for options, status in [(["--import", "tests.runtimes.numpy_runtime.plugin"], 0), ([], 2)]:
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    other_names = ("auto", *(name for name in runtime_names() if name != "numpy"))
    assert f"'numpy' is not one of {', '.join(map(repr, other_names))}" in done.stderr


def test_errors_name_the_runtime(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="numpy does not compile stages: leave out compile and compiled"):
        stagepack.load(bundle, runtime=["torch", "numpy", "torch"], compile=True)
    with pytest.raises(OptionError, match="numpy has no modules"):
        stagepack.load_stage(bundle, 0, runtime="numpy", modules=True)
    with pytest.raises(DeviceError, match="numpy runs stages on cpu"):
        stagepack.load(bundle, ["meta"], runtime="numpy")
    other = stagepack.export(torch.nn.Tanh(), (torch.ones(2),), out=tmp_path / "tanh.stagepack")
    with pytest.raises(OperatorError, match=r"stage 0: numpy has no aten\.tanh\.default"):
        stagepack.load(other, runtime="numpy")


class Unnamed(NumpyRuntime):
    """Has no name that can be one."""

    name = "no name"


class Torch(NumpyRuntime):
    """Has the name of another runtime."""

    name = "torch"


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (NumpyRuntime, "expected an object of a subclass of stagepack_loaders.base.Runtime, found ABCMeta"),
        ("numpy", "found str"),
        (Unnamed(), "Unnamed: expected a name that is an identifier, found 'no name'"),
        (Torch(), "there is another runtime with the name 'torch': choose another name"),
    ],
)
def test_what_is_no_runtime_is_refused(runtime: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        register_runtime(runtime)


def test_pipelines_of_a_pipeline_class_of_their_own_find_it(bundle: Path) -> None:
    opened = stagepack.open(bundle)
    stages = [stagepack.load_stage(bundle, number, runtime="numpy") for number in range(3)]
    assert numpy.allclose(Pipeline(opened, stages)(X), in_torch(bundle, X), atol=1e-5)
