"""Values that a model cannot take are errors of the client (400, INVALID_ARGUMENT); other failures are errors of the server."""

import contextlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tritonclient.utils import InferenceServerException

import stagepack
from stagepack.errors import InputError, StageFailedError
from stagepack_loaders.stage_errors import typed_stage_errors
from tests.serve.servers import Client, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")

TABLE = torch.arange(20.0).reshape(5, 4)
OUTSIDE = torch.tensor([7])


class Lookup(torch.nn.Module):
    """Reads rows of a table in its first stage, and elements of these in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.pick = Pick()

    def forward(self, tokens: torch.Tensor, indices: torch.Tensor) -> Any:
        return self.pick(self.embedding(tokens), indices)


class Pick(torch.nn.Module):
    def forward(self, rows: torch.Tensor, indices: torch.Tensor) -> Any:
        return rows.gather(1, indices)


class Grow(torch.nn.Module):
    """Answers as many numbers as the input says."""

    def forward(self, x: torch.Tensor, count: Any) -> Any:
        return x.new_ones(count)


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("lookup") / "lookup.stagepack"
    batch = torch.export.Dim("batch", min=1, max=8)
    inputs = (torch.tensor([1, 2]), torch.tensor([[0, 1], [2, 3]]))
    stagepack.export(Lookup(), inputs, out=path, split_at=["pick"], dynamic_shapes=({0: batch}, {0: batch}))
    stagepack.add_onnx(path)
    return path


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_values_out_of_range_are_errors_of_the_client(lookup: Path, runtime: str) -> None:
    good = {"tokens": numpy.array([1, 9]), "indices": numpy.array([[0, 3], [1, 2]])}
    with stagepack_server([lookup], "--runtime", runtime) as server:
        for protocol, status in (("http", "400"), ("grpc", "StatusCode.INVALID_ARGUMENT")):
            with contextlib.closing(Client(protocol, server)) as client:
                for input_name, value, stage in (("tokens", 10, 0), ("tokens", -11, 0), ("indices", 4, 1)):
                    bad = good | {input_name: numpy.full_like(good[input_name], value)}
                    with pytest.raises(InferenceServerException) as caught:
                        client.ask("lookup", bad)
                    assert caught.value.status() == status
                    message = caught.value.message()
                    assert message.startswith(f"lookup: an input value is out of range in stage {stage}: ")
                    assert "/" not in message  # no paths of the server
                assert client.ask("lookup", good)["output"].shape == (2, 2)


def test_a_failure_of_the_server_stays_its_own(tmp_path: Path) -> None:
    sizes = {"x": None, "count": torch.export.Dim.DYNAMIC(min=2, max=2**50)}
    stagepack.export(Grow(), (torch.ones(1), 4), out=tmp_path / "grow.stagepack", stages=1, dynamic_shapes=sizes)
    with stagepack_server([tmp_path / "grow.stagepack"]) as server:
        for protocol, status in (("http", "500"), ("grpc", "StatusCode.INTERNAL")):
            with contextlib.closing(Client(protocol, server)) as client:
                with pytest.raises(InferenceServerException, match="RuntimeError") as caught:
                    client.ask("grow", {"x": numpy.ones(1, "float32"), "count": numpy.array([2**50])})
                assert caught.value.status() == status
                assert client.ask("grow", {"x": numpy.ones(1, "float32"), "count": numpy.array([3])})


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.nn.functional.embedding(OUTSIDE, TABLE),
        lambda: torch.nn.functional.embedding_bag(OUTSIDE[None], TABLE),
        lambda: torch.nn.functional.one_hot(OUTSIDE, 3),
        lambda: torch.nn.functional.one_hot(-OUTSIDE),
        lambda: torch.nn.functional.nll_loss(TABLE[:1], OUTSIDE),
        lambda: TABLE[OUTSIDE],
        lambda: TABLE.gather(0, OUTSIDE[None]),
        lambda: TABLE.index_add(0, OUTSIDE, TABLE[:1]),
        lambda: TABLE.index_copy(0, OUTSIDE, TABLE[:1]),
        lambda: TABLE.index_put((OUTSIDE,), TABLE[0]),
        lambda: TABLE.index_select(0, OUTSIDE),
        lambda: TABLE.scatter(0, OUTSIDE[None], TABLE),
        lambda: TABLE.select(0, 7),
        lambda: TABLE.take(OUTSIDE * 10),
        lambda: torch.ops.aten._assert_scalar(False, "Runtime assertion failed for expression u0 <= 5 on node 'le'"),
    ],
)
def test_how_torch_reports_values_out_of_range(operation: Any) -> None:
    with pytest.raises(InputError, match=r"an input value is out of range in stage 3: \w"), typed_stage_errors(3):
        operation()


@pytest.mark.parametrize(
    "operation",
    [
        lambda: TABLE @ TABLE,
        lambda: torch.empty(2**50),
        lambda: torch.linalg.inv(torch.zeros(3, 3)),
        lambda: {"b": 1}["a"],
    ],
)
def test_other_errors_are_failures_of_the_stage(operation: Any) -> None:
    with pytest.raises(StageFailedError, match=r"^stage 3 failed: \w+: \S") as caught, typed_stage_errors(3):
        operation()
    assert isinstance(caught.value.__cause__, RuntimeError | KeyError)
