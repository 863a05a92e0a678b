"""Bundles of special models behind a server: several entry points, state in files, values that are too large or out of range, no rows."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.export import Dim

import stagepack
from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_loading import PipelineLoading
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_text.server.generators import Generators, generator_of
from tests.cli.entry_point_model import translator
from tests.modules import module_of
from tests.serve.local_server import local_server, refusal
from tests.serve.servers import Client, infer_json, post_json, refused, stagepack_server
from tests.text.generating_families import family_bundle


def test_each_entry_point_is_served(tmp_path: Path) -> None:
    model, inputs = translator()
    path = stagepack.export(model, entry_points=inputs, out=tmp_path / "translator.stagepack", stages=2).path
    ids = numpy.arange(6).reshape(2, 3)
    with torch.no_grad():
        hidden = model.encode(torch.from_numpy(ids))
        logits = model.decode(hidden)
    with local_server([path]) as server, Client("http", server) as client:
        assert [entry["name"] for entry in server.facts["models"]] == ["translator_encode", "translator_decode"]
        [encoded] = client.ask("translator_encode", {"ids": ids}).values()
        [decoded] = client.ask("translator_decode", {"hidden": hidden.numpy()}).values()
        assert numpy.array_equal(encoded, hidden.numpy())
        assert numpy.array_equal(decoded, logits.numpy())
    with stagepack_server([f"decoder={path}#decode"], "--processes", "2") as divided, Client("http", divided) as client:
        assert [entry["name"] for entry in divided.facts["models"]] == ["decoder"]
        [decoded] = client.ask("decoder", {"hidden": hidden.numpy()}).values()
        assert numpy.array_equal(decoded, logits.numpy())


def test_the_entry_points_of_a_bundle_are_served_from_python_as_by_the_command(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pipelines = stagepack.load_entry_points(family_bundle(tmp_path_factory, "t5"))
    models = ModelRegistry(ServerLimits(), Metrics())
    loaded = PipelineLoading({"t5": pipelines, "alone": pipelines.decode}, models)
    whole, alone = (loaded(name, 1, "", unless_digest=None) for name in ("t5", "alone"))
    assert {model.name: model.part(Generators) is not None for model in whole.models} == {
        "t5_encode": False,
        "t5": True,
    }
    with pytest.raises(BadRequestError, match="it is served without its encoder, and not as its whole bundle"):
        generator_of(alone.models[0])
    assert whole.close(1)
    assert alone.close(1)


class Recurrent(torch.nn.Module):
    """An LSTM, which ends the process of ONNX Runtime if it gets no rows; the sum over no rows has elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        states = self.lstm(x)[0]
        return states, states.sum(0)


def test_an_empty_batch_is_answered_and_ends_no_server_with_onnx_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, path = Recurrent().eval(), tmp_path / "recurrent.stagepack"
    dims = ({0: Dim("rows", min=0, max=8)},)
    stagepack.export(net, (torch.randn(2, 5, 4),), out=path, dynamic_shapes=dims, onnx=True)
    with stagepack_server([path], "--runtime", "onnxruntime") as server:
        for protocol in ("http", "grpc"):
            with Client(protocol, server) as client:
                for rows in (0, 3, 0):
                    x = torch.randn(rows, 5, 4)
                    answer = list(client.ask("recurrent", {"x": x.numpy()}).values())
                    with torch.no_grad():
                        wanted = net(x)
                    for mine, other in zip(answer, wanted, strict=True):
                        assert mine.shape == tuple(other.shape)
                        assert numpy.allclose(mine, other.numpy(), atol=1e-6)


X = numpy.arange(64, dtype="float32").reshape(1, 64)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.open("w").close(),
    "overwritten": _overwrite,
    "replaced": _replace,
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("option", ["--no-copy", pytest.param("--copy", marks=pytest.mark.slow)])
def test_a_server_answers_as_before_when_its_files_are_changed(option: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        original = stagepack.export(torch.nn.Linear(64, 64), (torch.from_numpy(X),), out=folder / "original")
        paths = {model: shutil.copytree(original.path, folder / model) for model in CHANGES}
        weight_file = original.stages[0].weights[0]
        with stagepack_server(list(paths.values()), option) as server, Client("http", server) as client:
            maps = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert (str(paths["cut"] / weight_file) in maps) == (option == "--no-copy")
            before = {model: client.ask(model, {"input": X}) for model in CHANGES}
            assert all(before.values())
            for model, change in CHANGES.items():
                change(paths[model] / weight_file)
            for model, answer in before.items():
                numpy.testing.assert_equal(client.ask(model, {"input": X}), answer)
            assert server.stop() == 0


def add_until_100(_: Any, start: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda x, s: x.sum() < 100, lambda x, s: (x + s, s.clone()), (start, step))[0]


@pytest.mark.slow
def test_an_endless_loop_is_ended_and_stops_no_other_model(tmp_path: Path) -> None:
    """Its processes are ended and started again."""
    model = module_of(add_until_100)  # without an end for a step of 0
    loop = stagepack.export(model, (torch.zeros(2), torch.ones(2)), out=tmp_path / "loop", stages=1)
    linear = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(2),), out=tmp_path / "linear", stages=1)
    zeros, ones = numpy.zeros(2, "float32"), numpy.ones(2, "float32")
    with stagepack_server([loop.path, linear.path], "--processes", "1", "--deadline-s", "3") as server:

        def run_loop() -> tuple[int, Any]:
            status, answer = infer_json(server, "loop", start=zeros, step=ones)
            return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]

        assert run_loop() == (200, [50.0, 50.0])
        expected = infer_json(server, "linear", input=ones)
        assert expected[0] == 200
        status, answer = infer_json(server, "loop", start=zeros, step=zeros)
        assert (status, answer["error"]) == (504, "loop: no answer before the deadline")
        statuses = []
        for _ in range(200):
            assert infer_json(server, "linear", input=ones) == expected
            statuses.append(run_loop()[0])
            if statuses[-1] == 200:
                break
            time.sleep(0.2)
        assert set(statuses[:-1]) <= {503, 504}
        assert run_loop() == (200, [50.0, 50.0])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of [rows] -> [rows]; inside is [rows, rows] of float32."""
    model = module_of(lambda self, x: (x[:, None] * x[None]).sum(dim=1))
    folder = tmp_path_factory.mktemp("pairs")
    shapes = {"x": {0: Dim("rows", min=1, max=1 << 20)}}
    stagepack.export(model, (torch.ones(10),), dynamic_shapes=shapes, out=folder / "pairs.stagepack")
    stagepack.export(model, (torch.ones(600),), out=folder / "large.stagepack")
    return folder


def test_a_request_at_which_a_value_is_too_large_is_refused(pairs: Path) -> None:
    with local_server([pairs / "pairs.stagepack"], "--max-value-bytes", "1MB") as server:
        for rows, expected_status in ((500, 200), (501, 400), (500, 200)):  # rows * rows * 4 bytes
            status, answer = infer_json(server, "pairs", x=numpy.ones(rows, "float32"))
            assert status == expected_status
            says = "expected at most 1,000,000 bytes for a value, found 1,004,004"
            assert status == 200 or says in answer["error"]


def test_bundles_that_are_too_large_at_any_sizes_or_in_their_example(pairs: Path) -> None:
    advice = "the example of the bundle exceeds --max-value-bytes: raise it"
    for name, limit, says in (("large", "1MB", "allow larger values"), ("pairs", "399", advice)):
        line = refusal(pairs / f"{name}.stagepack", "--max-value-bytes", limit)
        assert "bytes for a value, found" in line
        assert says in line


def test_the_limit_is_that_of_each_request_and_not_of_the_batch_that_they_are_joined_to(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("rows", min=1, max=64)}}
    model = module_of(lambda self, x: (x[:, :, None] * x[:, None]).sum(dim=1))  # inside are 256 bytes for each row
    stagepack.export(model, (torch.rand(3, 8),), dynamic_shapes=shapes, out=tmp_path / "products.stagepack")
    with local_server([tmp_path / "products.stagepack"], "--max-value-bytes", "1024") as server:
        model = server.facts["models"][0]
        assert (model["batch"], model["alone"]) == (32, "")
        for rows, status in ((4, 200), (5, 400)):
            assert infer_json(server, "products", x=numpy.full((rows, 8), 0.5, "float32"))[0] == status


def test_generation_has_the_same_limit(writer: Path) -> None:
    with local_server([writer], "--max-value-bytes", "13000") as server:
        for length, expected_status in ((10, 200), (60, 400)):
            prompt = [1] * length
            for path, fields in (
                ("/v2/models/writer/generate", {"input_ids": prompt}),
                ("/v1/completions", {"model": "writer", "prompt": prompt}),
            ):
                status, answer = post_json(server, path, max_tokens=3, **fields)
                assert status == expected_status, answer
                assert status == 200 or "expected at most 13,000 bytes for a value" in str(answer)


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads rows of a table in its first stage, and elements of these in its second."""
    parts = {"embedding": torch.nn.Embedding(10, 4), "pick": module_of(lambda self, x, indices: x.gather(1, indices))}
    model = module_of(lambda self, tokens, indices: self.pick(self.embedding(tokens), indices), **parts)
    path = tmp_path_factory.mktemp("lookup") / "lookup.stagepack"
    batch = Dim("batch", min=1, max=8)
    inputs = (torch.tensor([1, 2]), torch.tensor([[0, 1], [2, 3]]))
    stagepack.export(model, inputs, out=path, split_at=["pick"], dynamic_shapes=({0: batch}, {0: batch}))
    stagepack.add_onnx(path)
    return path


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_values_out_of_range_are_errors_of_the_client(lookup: Path, runtime: str) -> None:
    good = {"tokens": numpy.array([1, 9]), "indices": numpy.array([[0, 3], [1, 2]])}
    with local_server([lookup], "--runtime", runtime) as server:
        for protocol in ("http", "grpc"):
            with Client(protocol, server) as client:
                for input_name, value, stage in (("tokens", 10, 0), ("tokens", -11, 0), ("indices", 4, 1)):
                    bad = good | {input_name: numpy.full_like(good[input_name], value)}
                    with refused("400", "INVALID_ARGUMENT") as caught:
                        client.ask("lookup", bad)
                    message = caught.value.message()
                    assert message.startswith(f"lookup: an input value is out of range in stage {stage}: ")
                    assert "/" not in message  # no paths of the server
                assert client.ask("lookup", good)["output"].shape == (2, 2)


def test_a_failure_of_the_server_stays_its_own(tmp_path: Path) -> None:
    sizes = {"x": None, "count": Dim.DYNAMIC(min=2, max=2**50)}
    model = module_of(lambda self, x, count: x.new_ones(count).sum())
    stagepack.export(model, (torch.ones(1), 4), out=tmp_path / "grow.stagepack", stages=1, dynamic_shapes=sizes)
    with local_server([tmp_path / "grow.stagepack"]) as server:
        for protocol in ("http", "grpc"):
            with Client(protocol, server) as client:
                with refused("500", "INTERNAL", says="RuntimeError"):
                    client.ask("grow", {"x": numpy.ones(1, "float32"), "count": numpy.array([2**50])})
                assert client.ask("grow", {"x": numpy.ones(1, "float32"), "count": numpy.array([3])})
