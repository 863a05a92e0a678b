"""Sequences of a server whose stages run in processes: however one ends, the processes free its state."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
import stagepack.distributed
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.parameters import InferenceRequest, InferenceTensor
from stagepack_serving.server.served_model import ServedModel
from tests.distributed.bundles import in_processes, process_ids
from tests.modules import module_of
from tests.waiting import wait_until


@pytest.fixture
def pipeline(counting: Bundle) -> Iterator[DistributedPipeline]:
    with in_processes(counting, in_flight=1) as pipeline:
        yield pipeline


def sequence_counts(pipeline: DistributedPipeline) -> set[int]:
    """The number of sequences whose state a process keeps, of all processes that have told it after their last request."""
    statuses = [status for rank, status in pipeline.statuses().items() if rank]
    return {-1 if status.pending_requests else status.sequences for status in statuses}


async def infer(model: ServedModel, *, start: bool = False, end: bool = False) -> list[numpy.ndarray]:
    tensor = InferenceTensor(name="x", datatype="FP32", array=numpy.ones(4, "float32"))
    parameters = {"sequence_id": 1, "sequence_start": start, "sequence_end": end}
    async with asyncio.timeout(60) as deadline:
        outputs = await model.infer(
            InferenceRequest(inputs=[tensor], output_names=None, parameters=parameters), deadline
        )
    return [output.array for output in outputs]


async def ask(model: ServedModel, *, start: bool = False, end: bool = False) -> float:
    """The number of calls so far of the sequence, as the model answers it."""
    return float((await infer(model, start=start, end=end))[-1][0])


async def start_again(model: ServedModel) -> None:
    answers = await asyncio.gather(*[ask(model, start=True) for _ in range(20)])
    assert set(answers) == {1.0}
    assert await ask(model, end=True) == 2.0


async def go_away(model: ServedModel) -> None:
    for _ in range(20):
        calls = [asyncio.ensure_future(ask(model, start=start)) for start in (True, False, True)]
        await asyncio.sleep(0.002)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def close_the_sequence(model: ServedModel) -> None:
    call = asyncio.ensure_future(ask(model, start=True))
    await asyncio.sleep(0)
    model.end_sequence(1)
    assert await call == 1.0
    with pytest.raises(RequestError, match="unknown sequence 1"):
        await ask(model)


async def stop_the_server(model: ServedModel) -> None:
    assert await ask(model, start=True) == 1.0
    assert await ask(model) == 2.0


@pytest.mark.parametrize("use", [start_again, go_away, close_the_sequence, stop_the_server])
def test_no_state_is_left(use: Callable[[ServedModel], Awaitable[None]], pipeline: DistributedPipeline) -> None:
    model = ServedModel("m", pipeline, ServerLimits(max_pending_requests=100), Metrics())

    async def run() -> None:
        await use(model)

    asyncio.run(run())
    assert model.close(20)
    assert model.sequence_count == 0
    pipeline(torch.ones(4))
    wait_until(lambda: sequence_counts(pipeline) == {0})


def test_answers_of_a_stage_of_the_front_are_not_written_by_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = module_of(lambda self, x: self.total.add_(x), total=torch.zeros(4))  # returns its state itself
    bundle = stagepack.export(total, (torch.ones(4),), out=tmp_path / "total.stagepack", stages=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for variable, text in launched.items():
        monkeypatch.setenv(variable, text)

    async def ask_often(model: ServedModel) -> list[numpy.ndarray]:
        return [(await infer(model, start=number == 0))[0] for number in range(5)]

    pipeline = stagepack.distributed.connect(bundle)
    assert pipeline is not None
    with pipeline:
        model = ServedModel("m", pipeline, ServerLimits(), Metrics())
        answers = asyncio.run(ask_often(model))
        assert model.close(20)
    assert [float(array[0]) for array in answers] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_no_state_is_left_when_the_processes_start_again(counting: Bundle) -> None:
    with in_processes(counting, max_restarts=1) as pipeline:
        model = ServedModel("m", pipeline, ServerLimits(max_pending_requests=100), Metrics())

        async def run() -> None:
            assert await ask(model, start=True) == 1.0
            calls = [asyncio.ensure_future(ask(model, start=number % 5 == 0)) for number in range(60)]
            await asyncio.sleep(0.01)
            os.kill(process_ids(pipeline)[1], signal.SIGKILL)
            await asyncio.gather(*calls, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: pipeline.restart_count == 1 and pipeline.lost is None)
            assert await ask(model, start=True) == 1.0

        asyncio.run(run())
        assert model.close(20)
        pipeline.reset_state()
        pipeline(torch.ones(4))
        wait_until(lambda: sequence_counts(pipeline) == {0})


def test_sequences_of_clients_are_not_those_of_the_caller(pipeline: DistributedPipeline) -> None:
    """The pipeline that is served is used by its process, too."""
    model = ServedModel("m", pipeline, ServerLimits(), Metrics())
    with pipeline.sequence() as first, pipeline.sequence() as second:
        for count in (1, 2, 3):
            for sequence in (first, second):
                assert float(sequence(torch.ones(4))[1][0]) == count

        async def run() -> list[float]:
            return [await ask(model, start=True) for _ in range(3)]

        assert asyncio.run(run()) == [1.0] * 3
        assert float(first(torch.ones(4))[1][0]) == 4
    assert model.close(20)
