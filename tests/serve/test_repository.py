"""`stagepack triton`: the model repository that it writes, and a real `tritonserver` that loads it."""

import errno
import itertools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from torch.export import Dim
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

import stagepack
from stagepack.errors import DeviceError, InputError, OperatorError, OutputExistsError, WriteError
from stagepack.format.output_file import exchange_paths
from stagepack_serving.triton import repository
from stagepack_serving.triton.options import RepositoryOptions
from stagepack_serving.triton.repository import write_repository
from tests.serve.servers import STAGEPACK, Client, triton_server, why_no_triton

MEMORY = "/dev/shm"  # noqa: S108 - another file system than that of temporary files
pytestmark = pytest.mark.xdist_group("serve")


def write(bundle: Path, out: Any, **options: Any) -> Any:
    return write_repository(stagepack.open(bundle), out, RepositoryOptions(**({"model_name": "m"} | options)))


def config(folder: Path) -> ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())


def test_a_model_a_stage_and_an_ensemble(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    model_names = write(bundles["skips"], tmp_path, max_batch_size=8, batching_delay=0.01)
    assert model_names == ["m_stage_0", "m_stage_1", "m_stage_2", "m_results", "m"]
    assert sorted(os.listdir(tmp_path)) == sorted(model_names)
    second = config(tmp_path / "m_stage_1")
    assert [(tensor.name, list(tensor.dims)) for tensor in second.input] == [("weight", [1]), ("linear_0", [8])]
    assert second.max_batch_size == 8
    assert second.dynamic_batching.max_queue_delay_microseconds == 10_000
    steps = {step.model_name: step for step in config(tmp_path / "m").ensemble_scheduling.step}
    assert steps["m_stage_1"].input_map["linear_0"] == steps["m_stage_0"].output_map["linear_0"] == "parts.0"
    assert steps["m_stage_2"].input_map["linear_3"] == steps["m_stage_0"].output_map["linear_3"] == "stage_0.linear_3"
    assert steps["m_results"].input_map["x"] == "x"


def test_files_are_links_or_copies(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path / "links")
    write(bundles["half"], tmp_path / "copies", copy=True)
    stage = Path("m_stage_0") / "1"
    for file_name in ("manifest.json", "stage-0.msgpack", "stage-0.safetensors"):
        origin = bundles["half"] / file_name
        assert (tmp_path / "links" / stage / file_name).samefile(origin)
        copied = tmp_path / "copies" / stage / file_name
        assert not copied.samefile(origin)
        assert copied.read_bytes() == origin.read_bytes()
    assert not (tmp_path / "links" / stage / "stage-1.safetensors").exists()


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="needs a second file system")
def test_no_links_to_another_file_system(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    if os.stat(MEMORY).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system")
    out = Path(MEMORY) / f"stagepack-{os.getpid()}"
    with pytest.raises(WriteError, match="--copy"):
        write(bundles["half"], out)
    assert not list(out.iterdir())
    out.rmdir()


def test_other_models_of_the_repository_stay(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, model_name="one")
    write(bundles["half"], tmp_path, model_name="two")
    with pytest.raises(OutputExistsError, match="one: exists already"):
        write(bundles["half"], tmp_path, model_name="one")
    model_names = write_repository(
        stagepack.open(bundles["half"]), tmp_path, RepositoryOptions(model_name="one"), overwrite=True
    )
    two = {"two_stage_0", "two_stage_1", "two"}
    assert set(os.listdir(tmp_path)) == {*model_names, *two}
    write(bundles["skips"], tmp_path, model_name="three")
    write_repository(stagepack.open(bundles["half"]), tmp_path, RepositoryOptions(model_name="three"), overwrite=True)
    assert set(os.listdir(tmp_path)) == {*model_names, *two, "three_stage_0", "three_stage_1", "three"}
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / "config.pbtxt").write_text('name: "four"')
    with pytest.raises(OutputExistsError, match="not written by stagepack"):
        write_repository(
            stagepack.open(bundles["half"]), tmp_path, RepositoryOptions(model_name="four"), overwrite=True
        )


@pytest.mark.parametrize(
    ("can_exchange", "failing"), [*((False, index) for index in range(1, 9)), (True, 1), (True, 2)]
)
def test_what_cannot_be_renamed_leaves_all_as_it_was(
    bundles: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, failing: Any
) -> None:
    """Five models make room for three: one of the renames fails, which are eight, or two where folders can be exchanged."""
    if not can_exchange:
        monkeypatch.setattr(repository, "exchange_paths", lambda *_: False)
    write(bundles["skips"], tmp_path, model_name="one")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rename, rename_count = Path.rename, itertools.count(1)

    def failing_rename(source: Any, target: Any) -> Any:
        if next(rename_count) == failing:
            raise OSError(errno.EBUSY, "Device or resource busy", str(source), None, str(target))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(WriteError, match="busy"):
        write_repository(stagepack.open(bundles["half"]), tmp_path, RepositoryOptions(model_name="one"), overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_writer_that_is_killed_leaves_each_model_old_or_new(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    bundle, options = stagepack.open(bundles["half"]), RepositoryOptions(model_name="one")
    model_names = write_repository(bundle, tmp_path, options)
    for model_name in model_names:
        with (tmp_path / model_name / "config.pbtxt").open("a") as file:
            file.write("# old\n")
    exchange_count = itertools.count(1)

    def exchange_once(first: Path, second: Path) -> bool:
        if next(exchange_count) == 2:
            os._exit(9)
        return exchange_paths(first, second)

    if not (process_id := os.fork()):
        repository.exchange_paths = exchange_once  # type: ignore[attr-defined]
        write_repository(bundle, tmp_path, options, overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 9
    are_old = [(tmp_path / name / "config.pbtxt").read_text().endswith("# old\n") for name in model_names]
    assert are_old == [False, True, True]
    write_repository(bundle, tmp_path, options, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted(model_names)


def test_a_repository_in_the_bundle(bundles: Mapping[str, Path]) -> None:
    for folder in (bundles["half"], bundles["half"] / "models"):
        with pytest.raises(InputError, match="cannot contain a model repository"):
            write(bundles["half"], folder)
    stagepack.open(bundles["half"]).verify()


def test_devices(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["skips"], tmp_path, devices=["cpu", "cuda", "cuda:1"])
    groups = [config(tmp_path / f"m_stage_{stage_number}").instance_group[0] for stage_number in range(3)]
    assert [(group.kind, list(group.gpus)) for group in groups] == [
        (ModelInstanceGroup.KIND_CPU, []),
        (ModelInstanceGroup.KIND_GPU, [0]),
        (ModelInstanceGroup.KIND_GPU, [1]),
    ]
    for devices in (["mps"], ["cuda:x"], ["cpu"] * 4, []):
        with pytest.raises(DeviceError):
            write(bundles["skips"], tmp_path / "other", devices=devices)


def test_what_onnxruntime_cannot_run(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="stagepack onnx"):
        write(bundles["half"], tmp_path, runtime="onnxruntime", backend="onnxruntime")
    tower = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"
    with pytest.raises(OperatorError, match="stage 2: it keeps state"):
        write(tower, tmp_path, runtime="onnxruntime", backend="onnxruntime")
    assert write(tower, tmp_path, runtime="onnxruntime")


def test_tritons_onnxruntime_backend_finds_what_it_needs(
    bundles: Mapping[str, Path], pipes: Mapping[str, Any], tmp_path: Path
) -> None:
    """The backend makes a session of the file that the configuration names, by its path, and wants the names and types there."""
    write(bundles["skips"], tmp_path, runtime="onnxruntime", backend="onnxruntime", max_batch_size=8)
    inputs = {"x": numpy.ones((2, 8), "float32"), "weight": numpy.ones((2, 1), "float32")}
    values = dict(inputs)
    for stage_number in range(3):
        stage = config(tmp_path / f"m_stage_{stage_number}")
        assert stage.backend == "onnxruntime"
        assert not (tmp_path / stage.name / "1" / "model.py").exists()
        session = onnxruntime.InferenceSession(str(tmp_path / stage.name / "1" / stage.default_model_filename))
        for ours, theirs in ((stage.input, session.get_inputs()), (stage.output, session.get_outputs())):
            assert [tensor.name for tensor in ours] == [tensor.name for tensor in theirs]
            for tensor, their_tensor in zip(ours, theirs, strict=True):
                assert (DataType.Name(tensor.data_type), their_tensor.type) == ("TYPE_FP32", "tensor(float)")
                assert list(tensor.dims) == their_tensor.shape[1:]
        outputs = session.run(
            [tensor.name for tensor in stage.output], {tensor.name: values[tensor.name] for tensor in stage.input}
        )
        values.update(zip((tensor.name for tensor in stage.output), outputs, strict=True))
    with torch.no_grad():
        expected = pipes["skips"](torch.from_numpy(inputs["x"]), weight=torch.from_numpy(inputs["weight"]))["y"]
    steps = {step.model_name: step for step in config(tmp_path / "m").ensemble_scheduling.step}
    [tensor_name] = [edge for edge, tensor in steps["m_stage_2"].output_map.items() if tensor == "y"]
    assert numpy.allclose(values[tensor_name], expected.numpy(), atol=1e-5)


@pytest.fixture
def needs_triton() -> None:
    if reason := why_no_triton():
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_triton")
def test_a_bundle_with_onnx_in_triton(bundles: Mapping[str, Path], pipes: Mapping[str, Any], tmp_path: Path) -> None:
    command = [
        STAGEPACK,
        "triton",
        str(bundles["skips"]),
        "-o",
        str(tmp_path / "repository"),
        "--runtime",
        "onnxruntime",
        "--backend",
        "python",
    ]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "batches of up to 32" in completed.stdout
    write(bundles["singles"], tmp_path / "repository", model_name="singles")
    (tmp_path / "triton").mkdir()
    with triton_server(tmp_path / "repository", tmp_path / "triton") as server:
        client = Client("grpc", server)
        inputs = {"x": numpy.ones((3, 8), "float32"), "weight": numpy.ones((3, 1), "float32")}
        answer = client.ask("skips", inputs)
        single_inputs = {"x": numpy.ones((3, 4), "float32"), "weight": numpy.arange(3, dtype="float32")}
        single = client.ask("singles", single_inputs)
        client.close()
    with torch.no_grad():
        expected = pipes["skips"](torch.from_numpy(inputs["x"]), weight=torch.from_numpy(inputs["weight"]))
        singles = pipes["singles"](
            **{tensor_name: torch.from_numpy(array) for tensor_name, array in single_inputs.items()}
        )
    assert numpy.allclose(answer["y"], expected["y"].numpy(), atol=1e-5)
    assert numpy.allclose(answer["parts.1"], expected["parts"][1].numpy(), atol=1e-5)
    assert all(numpy.array_equal(single[tensor_name], singles[tensor_name].numpy()) for tensor_name in ("y", "z"))


@pytest.mark.slow
@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("change", ["dims", "weights"])
def test_triton_refuses_what_was_changed(bundles: Mapping[str, Path], tmp_path: Path, change: Any) -> None:
    write(bundles["half"], tmp_path / "repository", copy=True)
    if change == "dims":
        path = tmp_path / "repository" / "m_stage_1" / "config.pbtxt"
        path.write_text(path.read_text().replace("dims: 16", "dims: 17", 1))
    else:
        path = tmp_path / "repository" / "m_stage_1" / "1" / "stage-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    (tmp_path / "triton").mkdir()
    with (
        pytest.raises(AssertionError, match="m_stage_1") as caught,
        triton_server(tmp_path / "repository", tmp_path / "triton"),
    ):
        pass
    assert "tritonserver ended" in str(caught.value)


def test_the_command(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    for arguments, says in (
        ([bundles["together"]], "no batching: aten.mean.dim computes one result from several rows"),
        ([bundles["counting"]], "the model keeps state between calls"),
        ([bundles["singles"]], "weight has no dimension besides the batch dimension"),
        ([bundles["half"], "--max-batch", "1"], "no batching"),
        ([bundles["half"], "--name", "other", "--no-check"], "batches of up to 32"),
    ):
        completed = subprocess.run(
            [STAGEPACK, "triton", *arguments, "-o", tmp_path], capture_output=True, text=True, check=True
        )
        assert says in completed.stdout
    for arguments, status in (
        ([bundles["half"]], 1),
        ([bundles["half"], "--name", "../up"], 1),
        ([bundles["half"], "--name", "x", "--backend", "onnxruntime"], 2),
        ([tmp_path / "nothing"], 1),
    ):
        completed = subprocess.run(
            [STAGEPACK, "triton", *arguments, "-o", tmp_path], capture_output=True, text=True, check=False
        )
        assert completed.returncode == status, arguments
        assert completed.stderr


class SumsIfShort(torch.nn.Module):
    """Its stages take one input each, and it was captured for a condition on the sizes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self.first(x).sum() if x.shape[0] + y.shape[0] < 9 else x.sum()
        return self.second(y) + total


def test_guard_that_no_model_of_the_repository_checks_is_refused(tmp_path: Path) -> None:
    auto = {0: Dim.AUTO}
    args = torch.ones(4, 2), torch.ones(3, 2)
    bundle = stagepack.export(SumsIfShort(), args, dynamic_shapes=(auto, auto), split_at=["second"], out=tmp_path / "x")
    with pytest.raises(OperatorError, match=r"the model was captured for .* < 9, and no stage gets all of these sizes"):
        write(bundle.path, tmp_path / "repository")
    whole = stagepack.recut(bundle, out=tmp_path / "whole", stages=1)
    assert write(whole.path, tmp_path / "repository")
    stagepack.add_onnx(whole)
    with pytest.raises(
        OperatorError, match=r"captured for .* < 9, which Triton's onnxruntime backend does not support"
    ):
        write(whole.path, tmp_path / "other", runtime="onnxruntime", backend="onnxruntime")
