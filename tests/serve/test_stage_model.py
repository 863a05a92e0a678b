"""The model of a stage in Triton's Python backend, with a stand-in for the module that Triton gives it."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stagepack
from tests.serve.bundles import Bundles, export_means


class Tensor:
    def __init__(self, name: str, value: torch.Tensor) -> None:
        self.name, self.value = name, value
        self.__dlpack__, self.__dlpack_device__ = value.__dlpack__, value.__dlpack_device__

    def shape(self) -> list[int]:
        return list(self.value.shape)

    @classmethod
    def from_dlpack(cls, name: str, elements: Any) -> "Tensor":
        return cls(name, torch.utils.dlpack.from_dlpack(elements))


class Request(SimpleNamespace):
    def __init__(self, sequence: int = 0, flags: int = 0, **inputs: torch.Tensor) -> None:
        super().__init__(correlation_id=lambda: sequence, flags=lambda: flags, inputs=inputs)


START, END = 1, 2
TRITON = SimpleNamespace(
    Tensor=Tensor,
    TritonError=type("TritonError", (Exception,), {"INVALID_ARG": "invalid", "INTERNAL": "internal"}),
    InferenceResponse=lambda output_tensors, error=None: SimpleNamespace(outputs=output_tensors, error=error),
    get_input_tensor_by_name=lambda request, name: Tensor(name, request.inputs[name]),
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START=START,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END=END,
)


@pytest.fixture
def stage_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", TRITON)
    yield importlib.import_module("stagepack_serving.triton.stage_model").TritonPythonModel()
    sys.modules.pop("stagepack_serving.triton.stage_model")


def initialize(
    model: Any, path: Path, *, stage_number: int = 0, max_batch_size: int = 0, max_sequences: int = 1
) -> None:
    parameters = {
        "entry_point": "forward",
        "stage": str(stage_number),
        "runtime": "torch",
        "allow_ops": "",
        "imports": "",
    }
    config = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "max_batch_size": max_batch_size,
        "sequence_batching": {"oldest": {"max_candidate_sequences": max_sequences}},
    }
    model.initialize(
        {
            "model_config": json.dumps(config),
            "model_repository": str(path.parent),
            "model_version": path.name,
            "model_instance_kind": "CPU",
        }
    )


def test_requests_of_a_shape_run_as_one_batch_and_those_that_do_not_fit_alone(
    stage_model: Any, bundles: Bundles
) -> None:
    initialize(stage_model, bundles["together"], max_batch_size=8)
    batches = [torch.randn(rows, 4) for rows in (2, 3)]
    responses = stage_model.execute([Request(x=batches[0]), Request(x=torch.ones(2, 5)), Request(x=batches[1])])
    expected = stagepack.load(bundles["together"])(torch.cat(batches))["y"].detach()
    answers = torch.cat([response.outputs[0].value for response in (responses[0], responses[2])])
    torch.testing.assert_close(answers, expected)
    assert "expected 4" in str(responses[1].error)


def test_requests_of_a_number_run_as_one_batch(stage_model: Any, tmp_path: Path) -> None:
    path = export_means(tmp_path / "means.stagepack")
    bundle, pipe = stagepack.open(path), stagepack.load(path)
    [number] = [edge for edge in bundle.edges if edge.dtype == "symint"]
    calls = [torch.randn(rows, length) for rows, length in ((2, 5), (3, 5), (1, 9))]
    initialize(stage_model, path, max_batch_size=8)
    crossing = [
        {tensor.name: tensor.value for tensor in response.outputs}
        for response in stage_model.execute([Request(x=x) for x in calls])
    ]
    assert [values[number.name].tolist() for values in crossing] == [[5, 5], [5, 5, 5], [9]]
    initialize(stage_model, path, stage_number=1, max_batch_size=8)
    differing = crossing[0] | {number.name: torch.tensor([5, 6])}
    *responses, refused = stage_model.execute([Request(**values) for values in (*crossing, differing)])
    for x, response in zip(calls, responses, strict=True):
        torch.testing.assert_close(response.outputs[0].value, pipe(x)["y"].detach())
    assert f"{number.name}: expected the same number for each row, found [5, 6]" in str(refused.error)


def test_sequences_have_state_of_their_own(stage_model: Any, bundles: Bundles) -> None:
    initialize(stage_model, bundles["alias"])

    def run(sequence: int, flags: int = 0) -> Any:
        [response] = stage_model.execute([Request(sequence, flags, x=torch.ones(1))])
        return str(response.error) if response.error else float(response.outputs[0].value[0, 0])

    assert [run(1, START), run(1), run(1)] == [1, 2, 3]
    assert run(2, START) == 1
    assert "the state of the sequence 1 was evicted" in run(1)
    assert run(2, END) == 2
    assert "the state of the sequence 2 was evicted" in run(2)
