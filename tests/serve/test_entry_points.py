"""Each entry point of a bundle is a model of its own for clients."""

from pathlib import Path

import numpy
import pytest
import torch
import tritonclient.http

import stagepack
from tests.cli.entry_point_model import translator
from tests.serve.servers import stagepack_server


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, inputs = translator()
    out = tmp_path_factory.mktemp("entry_points") / "translator.stagepack"
    return stagepack.export(model, entry_points=inputs, out=out, stages=2).path


def ask(port: int, model_name: str, input_name: str, array: numpy.ndarray, datatype: str) -> numpy.ndarray:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = tritonclient.http.InferInput(input_name, list(array.shape), datatype).set_data_from_numpy(array)
        answer = client.infer(model_name, [tensor])
        return answer.as_numpy(answer.get_response()["outputs"][0]["name"])


def test_each_entry_point_is_served(path: Path) -> None:
    model, _ = translator()
    ids = numpy.arange(6).reshape(2, 3)
    with torch.no_grad():
        hidden = model.encode(torch.from_numpy(ids))
        logits = model.decode(hidden)
    with stagepack_server([path]) as server:
        assert [entry["name"] for entry in server.facts["models"]] == ["translator_encode", "translator_decode"]
        assert numpy.array_equal(ask(server.http, "translator_encode", "ids", ids, "INT64"), hidden.numpy())
        assert numpy.array_equal(
            ask(server.http, "translator_decode", "hidden", hidden.numpy(), "FP32"), logits.numpy()
        )
    with stagepack_server([f"decoder={path}#decode"], "--processes", "2") as server:
        assert [entry["name"] for entry in server.facts["models"]] == ["decoder"]
        assert numpy.array_equal(ask(server.http, "decoder", "hidden", hidden.numpy(), "FP32"), logits.numpy())
