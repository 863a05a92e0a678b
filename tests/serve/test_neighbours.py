"""One client never changes the answer of another: requests that share a batch with NaN, errors, and clients that have gone."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.parameters import InferenceRequest, InferenceTensor
from stagepack_serving.server.served_model import ServedModel
from tests.modules import module_of
from tests.serve.bundles import Bundles

# A batch runs when it has this many rows, or after a delay that no test waits for.
BATCH_SIZE, DELAY_SECONDS = 8, 60.0
VOCABULARY = 10


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Takes numbers and an id for each row."""
    torch.manual_seed(0)
    parts = {"table": torch.nn.Embedding(VOCABULARY, 6), "layer": torch.nn.Linear(6, 3)}
    tagger = module_of(lambda self, x, ids: self.layer((x + self.table(ids)).tanh()).softmax(-1), **parts).eval()
    out: Path = tmp_path_factory.mktemp("neighbours") / "tagger.stagepack"
    rows = torch.export.Dim("rows", min=1, max=64)
    example = (torch.randn(3, 6), torch.tensor([1, 2, 3]))
    return stagepack.export(tagger, example, out=out, stages=2, dynamic_shapes=({0: rows}, {0: rows}))


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Iterator[ServedModel]:
    with served(bundle, DELAY_SECONDS) as model:
        yield model


@contextlib.contextmanager
def served(bundle: Bundle, batching_delay: float) -> Iterator[ServedModel]:
    """The bundle as a server has it, without a port."""
    limits = ServerLimits(max_batch_size=BATCH_SIZE, batching_delay=batching_delay)
    model = ServedModel("tagger", stagepack.load(bundle), limits, Metrics())
    assert model.max_batch_size == BATCH_SIZE
    yield model
    assert model.close(20)


def request(values: Array, ids: Array) -> InferenceRequest:
    return InferenceRequest(
        inputs=[
            InferenceTensor(name="x", datatype="FP32", array=values),
            InferenceTensor(name="ids", datatype="INT64", array=ids),
        ]
    )


def own_request(rows: int) -> InferenceRequest:
    values = numpy.linspace(-2, 2, rows * 6, dtype=numpy.float32).reshape(rows, 6)
    return request(values, numpy.arange(rows, dtype=numpy.int64))


async def answer(model: ServedModel, sent: InferenceRequest) -> Array:
    async with asyncio.timeout(DELAY_SECONDS) as deadline:
        return (await model.infer(sent, deadline))[0].array


def answer_alone(model: ServedModel, sent: InferenceRequest) -> Array:
    pipe = stagepack.load(model.bundle)
    with torch.inference_mode():
        result: Array = pipe(*[torch.from_numpy(tensor.array) for tensor in sent.inputs]).numpy()
    return result


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e-30, 0.0])
def test_values_of_a_neighbour_change_no_answer(model: ServedModel, value: float) -> None:
    own = own_request(5)
    neighbour = request(numpy.full((3, 6), value, numpy.float32), numpy.array([9, 9, 0]))

    async def both() -> tuple[Array, Array]:
        return await asyncio.gather(answer(model, own), answer(model, neighbour))

    own_answer, other_answer = asyncio.run(both())
    numpy.testing.assert_allclose(own_answer, answer_alone(model, own), rtol=1e-6, atol=1e-7)
    numpy.testing.assert_allclose(other_answer, answer_alone(model, neighbour), rtol=1e-6, atol=1e-7)


def test_neighbour_that_fails_is_the_only_one_that_fails(model: ServedModel) -> None:
    own = own_request(5)
    neighbour = request(numpy.zeros((3, 6), numpy.float32), numpy.array([0, VOCABULARY, 0]))

    async def both() -> tuple[Array, BaseException]:
        own_answer, error = await asyncio.gather(answer(model, own), answer(model, neighbour), return_exceptions=True)
        assert isinstance(own_answer, numpy.ndarray)
        assert isinstance(error, BaseException)
        return own_answer, error

    own_answer, error = asyncio.run(both())
    assert isinstance(error, RequestError)
    numpy.testing.assert_allclose(own_answer, answer_alone(model, own), rtol=1e-6, atol=1e-7)


def test_neighbour_that_has_gone_changes_no_answer(bundle: Bundle) -> None:
    own, lost = own_request(5), request(numpy.full((3, 6), math.nan, numpy.float32), numpy.zeros(3, int))

    async def beside_lost(model: ServedModel) -> Array:
        gone = asyncio.create_task(answer(model, lost))
        own_answer = asyncio.create_task(answer(model, own))
        await asyncio.sleep(0)  # both are in the queue; whether their batch runs already is no matter
        gone.cancel()
        return await own_answer

    with served(bundle, 0.05) as model:
        numpy.testing.assert_allclose(asyncio.run(beside_lost(model)), answer_alone(model, own), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "neighbour",
    [
        InferenceRequest(inputs=[InferenceTensor(name="x", datatype="FP64", array=numpy.zeros((3, 6)))]),
        request(numpy.zeros((3, 6, 1), numpy.float32), numpy.zeros(3, int)),
        request(numpy.zeros((3, 7), numpy.float32), numpy.zeros(3, int)),
        request(numpy.zeros((3, 6), numpy.float32), numpy.zeros(2, int)),
    ],
    ids=["another dtype", "more dimensions", "another size", "fewer rows in one input"],
)
def test_neighbour_that_does_not_fit_joins_no_batch(model: ServedModel, neighbour: InferenceRequest) -> None:
    own = own_request(BATCH_SIZE)

    async def both() -> list[Array | BaseException]:
        return list(await asyncio.gather(answer(model, neighbour), answer(model, own), return_exceptions=True))

    error, own_answer = asyncio.run(both())
    assert isinstance(error, RequestError)
    assert isinstance(own_answer, numpy.ndarray)
    numpy.testing.assert_allclose(own_answer, answer_alone(model, own), rtol=1e-6, atol=1e-7)


def test_log_says_why_requests_run_alone(bundle: Bundle, bundles: Bundles, caplog: pytest.LogCaptureFixture) -> None:
    together = stagepack.open(bundles["together"])
    with caplog.at_level("DEBUG", "stagepack.serve"), served(bundle, 0):
        assert ServedModel("mixed", stagepack.load(together), ServerLimits(), Metrics()).close(20)
    assert "mixed: requests run alone: aten.mean.dim computes one result from several rows" in caplog.messages
    assert f"tagger: batches of up to {BATCH_SIZE} rows" in caplog.messages
