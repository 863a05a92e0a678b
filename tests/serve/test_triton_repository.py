"""`stagepack triton`: the model repository that it writes, what it replaces there, and a real `tritonserver` that loads it."""

# Long because all its tests use the same bundles, which take seconds to export.
import errno
import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from google.protobuf import text_format
from torch.export import Dim
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

import stagepack
from stagepack.cli import main
from stagepack.errors import DeviceError, InputError, OperatorError, OutputExistsError, WriteError
from stagepack.format.output_file import exchange_paths
from stagepack_serving.triton import repository
from stagepack_serving.triton.model_configs import RepositoryOptions
from stagepack_serving.triton.repository import write_repository
from tests.serve.bundles import Bundles, export_means
from tests.serve.servers import Client, triton_server, why_no_triton

MEMORY = "/dev/shm"  # noqa: S108 - another file system than that of temporary files


def write(bundle: Path, out: Path, model_name: str = "m", *, overwrite: bool = False, **options: Any) -> list[str]:
    repository_options = RepositoryOptions(model_name=model_name, **options)
    return write_repository(stagepack.open(bundle), out, repository_options, overwrite=overwrite)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_config(folder: Path, config_text: str) -> None:
    folder.mkdir()
    (folder / "config.pbtxt").write_text(config_text, errors="surrogateescape")


def config(folder: Path) -> ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())


def steps_of(folder: Path) -> dict[str, Any]:
    return {step.model_name: step for step in config(folder).ensemble_scheduling.step}


def test_a_model_a_stage_and_an_ensemble(bundles: Bundles, tmp_path: Path) -> None:
    model_names = write(bundles["skips"], tmp_path, max_batch_size=8, batching_delay=0.01)
    assert model_names == ["m_stage_0", "m_stage_1", "m_stage_2", "m_results", "m"]
    assert sorted(os.listdir(tmp_path)) == sorted(model_names)
    second = config(tmp_path / "m_stage_1")
    assert [(tensor.name, list(tensor.dims)) for tensor in second.input] == [("weight", [1]), ("linear_0", [8])]
    assert second.max_batch_size == 8
    assert second.dynamic_batching.max_queue_delay_microseconds == 10_000
    steps = steps_of(tmp_path / "m")
    assert steps["m_stage_1"].input_map["linear_0"] == steps["m_stage_0"].output_map["linear_0"] == "parts.0"
    assert steps["m_stage_2"].input_map["linear_3"] == steps["m_stage_0"].output_map["linear_3"] == "stage_0.linear_3"
    assert steps["m_results"].input_map["x"] == "x"


def test_files_are_links_or_copies(bundles: Bundles, tmp_path: Path) -> None:
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
def test_no_links_to_another_file_system(bundles: Bundles, tmp_path: Path) -> None:
    if os.stat(MEMORY).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system")
    out = Path(MEMORY) / f"stagepack-{os.getpid()}"
    with pytest.raises(WriteError, match="--copy"):
        write(bundles["half"], out)
    assert not list(out.iterdir())
    out.rmdir()


def test_other_models_of_the_repository_stay(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, "one")
    write(bundles["half"], tmp_path, "two")
    with pytest.raises(OutputExistsError, match="one: exists already"):
        write(bundles["half"], tmp_path, "one")
    model_names = write(bundles["half"], tmp_path, "one", overwrite=True)
    two = {"two_stage_0", "two_stage_1", "two"}
    assert set(os.listdir(tmp_path)) == {*model_names, *two}
    write(bundles["skips"], tmp_path, "three")
    write(bundles["half"], tmp_path, "three", overwrite=True)
    assert set(os.listdir(tmp_path)) == {*model_names, *two, "three_stage_0", "three_stage_1", "three"}
    write_config(tmp_path / "four", 'name: "four"')
    with pytest.raises(OutputExistsError, match="not written by stagepack"):
        write(bundles["half"], tmp_path, "four", overwrite=True)


@pytest.mark.parametrize(
    ("can_exchange", "failing"), [*((False, index) for index in range(1, 9)), (True, 1), (True, 2)]
)
def test_what_cannot_be_renamed_leaves_all_as_it_was(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, failing: Any
) -> None:
    """Five models make room for three: one of the renames fails, which are eight, or two where folders can be exchanged."""
    if not can_exchange:
        monkeypatch.setattr(repository, "exchange_paths", lambda *_: False)
    write(bundles["skips"], tmp_path, "one")
    before = contents(tmp_path)
    rename, rename_count = Path.rename, itertools.count(1)

    def failing_rename(source: Any, target: Any) -> Any:
        if next(rename_count) == failing:
            raise OSError(errno.EBUSY, "Device or resource busy", str(source), None, str(target))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(WriteError, match="busy"):
        write(bundles["half"], tmp_path, "one", overwrite=True)
    assert contents(tmp_path) == before


def test_a_writer_that_is_killed_leaves_each_model_old_or_new(bundles: Bundles, tmp_path: Path) -> None:
    model_names = write(bundles["half"], tmp_path, "one")
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
        write(bundles["half"], tmp_path, "one", overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 9
    are_old = [(tmp_path / name / "config.pbtxt").read_text().endswith("# old\n") for name in model_names]
    assert are_old == [False, True, True]
    write(bundles["half"], tmp_path, "one", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted(model_names)


def test_a_repository_in_the_bundle(bundles: Bundles) -> None:
    for folder in (bundles["half"], bundles["half"] / "models"):
        with pytest.raises(InputError, match="cannot contain a model repository"):
            write(bundles["half"], folder)
    stagepack.open(bundles["half"]).verify()


def test_devices(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["skips"], tmp_path, devices=["cpu", "cuda", "cuda:1"])
    groups = [config(tmp_path / f"m_stage_{stage_number}").instance_group[0] for stage_number in range(3)]
    cpu, gpu = ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_GPU
    assert [(group.kind, list(group.gpus)) for group in groups] == [(cpu, []), (gpu, [0]), (gpu, [1])]
    for devices in (["mps"], ["cuda:x"], ["cpu"] * 4, []):
        with pytest.raises(DeviceError):
            write(bundles["skips"], tmp_path / "other", devices=devices)


def test_what_onnxruntime_cannot_run(bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="stagepack onnx"):
        write(bundles["half"], tmp_path, runtime="onnxruntime", backend="onnxruntime")
    tower = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"
    with pytest.raises(OperatorError, match="stage 2: it keeps state"):
        write(tower, tmp_path, runtime="onnxruntime", backend="onnxruntime")
    assert write(tower, tmp_path, runtime="onnxruntime")


def test_tritons_onnxruntime_backend_finds_what_it_needs(
    bundles: Bundles, pipes: Mapping[str, Any], tmp_path: Path
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
    steps = steps_of(tmp_path / "m")
    [tensor_name] = [edge for edge, tensor in steps["m_stage_2"].output_map.items() if tensor == "y"]
    assert numpy.allclose(values[tensor_name], expected.numpy(), atol=1e-5)


@pytest.mark.skipif(why_no_triton() != "", reason=why_no_triton())
def test_bundles_with_onnx_and_with_numbers_that_cross_a_cut_in_triton(
    bundles: Bundles, pipes: Mapping[str, Any], tmp_path: Path
) -> None:
    means = export_means(tmp_path / "means.stagepack")
    for path, options in ((bundles["skips"], ["--runtime", "onnxruntime", "--backend", "python"]), (means, [])):
        command = ["triton", str(path), "-o", str(tmp_path / "repository"), *options]
        assert "batches of up to 32" in CliRunner().invoke(main, command).stdout
    write(bundles["singles"], tmp_path / "repository", "singles")
    (tmp_path / "triton").mkdir()
    inputs = {"x": numpy.ones((3, 8), "float32"), "weight": numpy.ones((3, 1), "float32")}
    single_inputs = {"x": numpy.ones((3, 4), "float32"), "weight": numpy.arange(3, dtype="float32")}
    calls = [torch.randn(rows, length) for rows, length in ((2, 5), (3, 5), (1, 9))]
    with triton_server(tmp_path / "repository", tmp_path / "triton") as server, Client("grpc", server) as client:
        answer = client.ask("skips", inputs)
        single = client.ask("singles", single_inputs)
        mean_answers = [client.ask("means", {"x": x.numpy()})["y"] for x in calls]
    with torch.no_grad():
        expected = pipes["skips"](torch.from_numpy(inputs["x"]), weight=torch.from_numpy(inputs["weight"]))
        singles = pipes["singles"](**{name: torch.from_numpy(array) for name, array in single_inputs.items()})
        expected_means = [stagepack.load(means)(x)["y"].numpy() for x in calls]
    assert numpy.allclose(answer["y"], expected["y"].numpy(), atol=1e-5)
    assert numpy.allclose(answer["parts.1"], expected["parts"][1].numpy(), atol=1e-5)
    assert all(numpy.array_equal(single[tensor_name], singles[tensor_name].numpy()) for tensor_name in ("y", "z"))
    for found, wanted in zip(mean_answers, expected_means, strict=True):
        numpy.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_numbers_that_cross_a_cut_have_no_batches_in_onnxruntime(tmp_path: Path) -> None:
    path = export_means(tmp_path / "means.stagepack")
    stagepack.add_onnx(path)
    arguments = ["triton", str(path), "-o", str(tmp_path / "repository"), "--runtime", "onnxruntime"]
    printed = CliRunner().invoke(main, arguments)
    assert "is a number, for which the backend onnxruntime" in printed.stdout, printed.output


@pytest.mark.slow
@pytest.mark.skipif(why_no_triton() != "", reason=why_no_triton())
@pytest.mark.parametrize("change", ["dims", "weights"])
def test_triton_refuses_what_was_changed(bundles: Bundles, tmp_path: Path, change: Any) -> None:
    write(bundles["half"], tmp_path / "repository", copy=True)
    if change == "dims":
        path = tmp_path / "repository" / "m_stage_1" / "config.pbtxt"
        path.write_text(path.read_text().replace("dims: 16", "dims: 17", 1))
    else:
        path = tmp_path / "repository" / "m_stage_1" / "1" / "stage-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    (tmp_path / "triton").mkdir()
    with pytest.raises(AssertionError, match=r"(?s)tritonserver ended.*m_stage_1"):
        triton_server(tmp_path / "repository", tmp_path / "triton").__enter__()


@pytest.mark.parametrize(
    ("bundle_name", "options", "status", "says"),
    [
        ("together", [], 0, "no batching: aten.mean.dim computes one result from several rows"),
        ("counting", [], 0, "the model keeps state between calls"),
        ("singles", [], 0, "weight has no dimension besides the batch dimension"),
        ("half", ["--max-batch", "1"], 0, "no batching"),
        ("half", ["--name", "other", "--no-check"], 0, "batches of up to 32"),
        ("half", ["--name", "../up"], 1, "'../up'"),
        ("half", ["--name", "x", "--backend", "onnxruntime"], 2, "--backend"),
        ("nothing", [], 1, "nothing"),
    ],
)
def test_the_command(
    bundles: Bundles, tmp_path: Path, bundle_name: str, options: list[str], status: int, says: str
) -> None:
    path = bundles.get(bundle_name, tmp_path / "nothing")
    result = CliRunner().invoke(main, ["triton", str(path), "-o", str(tmp_path / "repository"), *options])
    assert (result.exit_code, says in (result.stderr if status else result.stdout)) == (status, True), result.output
    if not status:
        again = CliRunner().invoke(main, ["triton", str(path), "-o", str(tmp_path / "repository"), *options])
        assert (again.exit_code, "exists already" in again.stderr) == (1, True), again.output


class SumsIfShort(torch.nn.Module):
    """Its stages take one input each, and it was captured for a condition on the sizes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self.first(x).sum() if x.shape[0] + y.shape[0] < 9 else x.sum()
        return self.second(y) + total


@pytest.mark.parametrize("as_json", [False, True])
def test_the_repository_of_a_decoder_has_no_generate(writer: Path, tmp_path: Path, as_json: bool) -> None:
    arguments = ["triton", str(writer), "-o", str(tmp_path / "repository"), *["--json"][: int(as_json)]]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    says = '"generate": null' if as_json else "there is no generate: clients drive the decoder"
    assert says in result.output


def test_guard_that_no_model_of_the_repository_checks_is_refused(tmp_path: Path) -> None:
    auto = {0: Dim.AUTO}
    args = torch.ones(4, 2), torch.ones(3, 2)
    bundle = stagepack.export(SumsIfShort(), args, dynamic_shapes=(auto, auto), split_at=["second"], out=tmp_path / "x")
    with pytest.raises(OperatorError, match=r"the model was captured for .* < 9, and no stage gets all of these sizes"):
        write(bundle.path, tmp_path / "repository")
    whole = stagepack.recut(bundle, out=tmp_path / "whole", stages=1)
    assert write(whole.path, tmp_path / "repository")
    stagepack.add_onnx(whole)
    with pytest.raises(OperatorError, match=r"captured for .* < 9, which Triton's onnxruntime backend does not"):
        write(whole.path, tmp_path / "other", runtime="onnxruntime", backend="onnxruntime")


USER_ENSEMBLE = """
name: "mine"
platform: "ensemble"
field_of_a_newer_triton: 1
ensemble_scheduling { step { model_name: "net_stage_0" model_version: -1 } }
"""


def refuses_to_replace(bundle: Path, models: Path, says: str, model_name: str = "net") -> None:
    """A refused call changes nothing."""
    before = contents(models)
    with pytest.raises(OutputExistsError, match=says):
        write(bundle, models, model_name, overwrite=True)
    assert contents(models) == before


def test_ensembles_with_names_like_parts_stay(bundles: Bundles, tmp_path: Path) -> None:
    for model_name in ("net", "net_stage_7", "net_results"):
        write(bundles["half"], tmp_path, model_name)
    before = {path: content for path, content in contents(tmp_path).items() if path.startswith("net_stage_7")}
    folders = set(os.listdir(tmp_path))
    write(bundles["half"], tmp_path, "net", overwrite=True)
    after = contents(tmp_path)
    assert set(os.listdir(tmp_path)) == folders
    assert {path: content for path, content in after.items() if path.startswith("net_stage_7")} == before
    assert "net_results/config.pbtxt" in after


def test_an_ensemble_with_the_name_of_a_new_part_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, "net", overwrite=True)
    write(bundles["half"], tmp_path, "net_results", overwrite=True)
    says = "net_results: expected the ensemble net or a part of it, found an ens"
    refuses_to_replace(bundles["skips"], tmp_path, says)
    shutil.rmtree(tmp_path / "net_results")
    write(bundles["skips"], tmp_path, "net", overwrite=True)
    refuses_to_replace(bundles["half"], tmp_path, "net_stage_1: expected .*found a part of an", "net_stage_1")


def test_a_model_that_another_ensemble_uses_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, "net", overwrite=True)
    write_config(tmp_path / "mine", USER_ENSEMBLE)
    refuses_to_replace(bundles["half"], tmp_path, "net_stage_0: .* found that mine uses it too: .*or remove mine first")


def test_steps_of_other_names_stay(bundles: Bundles, tmp_path: Path) -> None:
    """A configuration that its user has changed names models that are no parts of it, and a folder above the repository."""
    for model_name in ("net", "two"):
        write(bundles["half"], tmp_path / "repository", model_name)
    config_path = tmp_path / "repository" / "net" / "config.pbtxt"
    config_path.write_text(config_path.read_text().replace("net_stage_1", "two_stage_1"))
    write_config(tmp_path / "net_stage_1", "")
    config_path.write_text(config_path.read_text().replace("net_stage_0", "../net_stage_1"))
    before = contents(tmp_path)
    write(bundles["half"], tmp_path / "repository", "net", overwrite=True)
    assert contents(tmp_path).keys() == before.keys()


@pytest.mark.parametrize(
    "added_file", ["net/labels.txt", "net_stage_0/2/mine.bin", "net_stage_1/1/labels.json", "net/2"]
)
def test_files_of_the_user_are_not_deleted(bundles: Bundles, tmp_path: Path, added_file: str) -> None:
    write(bundles["half"], tmp_path, "net")
    folder_name, _, path_in_folder = added_file.partition("/")
    (tmp_path / added_file).parent.mkdir(exist_ok=True)
    if path_in_folder == "2":  # a link, called as a version
        (tmp_path / added_file).symlink_to(tmp_path / "net" / "1")
    else:
        (tmp_path / added_file).write_text("precious")
    says = f"{folder_name}: expected only files that stagepack writes, found {path_in_folder}, .*: move it out"
    refuses_to_replace(bundles["half"], tmp_path, says)


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_all_that_is_written_is_replaced(bundles: Bundles, tmp_path: Path, backend: str) -> None:
    """Also parts that the new ensemble lacks, and what the Python of a server writes into a model."""
    write(bundles["skips"], tmp_path, "net", runtime="onnxruntime", backend=backend)
    for model_code in list(tmp_path.glob("*/1/model.py")):
        (model_code.parent / "__pycache__").mkdir()
        (model_code.parent / "__pycache__" / "model.cpython-312.pyc").touch()
    assert (tmp_path / "net_results").is_dir()
    assert write(bundles["half"], tmp_path, "net", overwrite=True) == ["net_stage_0", "net_stage_1", "net"]
    assert sorted(os.listdir(tmp_path)) == ["net", "net_stage_0", "net_stage_1"]


def test_parts_that_a_killed_writer_left_are_replaced(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, "net", overwrite=True)
    shutil.rmtree(tmp_path / "net")
    with pytest.raises(OutputExistsError, match="net_stage_1: exists already"):
        write(bundles["half"], tmp_path, "net")
    assert write(bundles["half"], tmp_path, "net", overwrite=True) == ["net_stage_0", "net_stage_1", "net"]


@pytest.mark.parametrize("config_text", ["name: {", "name: '\udcff'"])
def test_a_configuration_that_cannot_be_read_is_refused(bundles: Bundles, tmp_path: Path, config_text: str) -> None:
    write(bundles["half"], tmp_path, "net", overwrite=True)
    write_config(tmp_path / "mine", config_text)
    refuses_to_replace(bundles["half"], tmp_path, "mine/config.pbtxt: expected a configuration of Triton")


def test_a_repository_that_cannot_be_read_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    write(bundles["half"], tmp_path, "net", overwrite=True)
    config_path = tmp_path / "net" / "config.pbtxt"
    config_path.unlink()
    config_path.symlink_to("/proc/self/mem")
    with pytest.raises(WriteError, match="Input/output error"):
        write(bundles["half"], tmp_path, "net", overwrite=True)
