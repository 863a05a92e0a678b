"""A thread that runs batches ends: the server says that it is not ready, answers what waits, and ends."""

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckResponse

import stagepack
from stagepack.errors import StageLostError
from stagepack_serving.server.errors import AddressError
from stagepack_serving.server.grpc_service import HealthService
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.scheduler import CallBatch, QueuedCall, Scheduler
from stagepack_serving.server.served_model import ServedModel
from tests.serve.servers import INFER, Client, post, skips_request, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")

# Raises SystemExit in the thread of the first lane.
KILLER = """
import ctypes, signal, threading

def kill(*_):
    for thread in threading.enumerate():
        if thread.name == "lane-0":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))

signal.signal(signal.SIGUSR1, kill)
"""


def test_a_server_with_a_lost_thread_is_not_ready(tmp_path: Path) -> None:
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "x.stagepack", stages=1)
    models = ModelRegistry(ServerLimits(), Metrics())
    model = ServedModel("x", bundle, stagepack.load(bundle), models.limits, models.metrics)
    models.serve([model])
    health = HealthService(models)
    assert models.is_ready
    assert health._status("") == health._status("x") == HealthCheckResponse.SERVING
    [thread] = model._scheduler._threads
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    call = QueuedCall(inputs={"x": numpy.ones((1, 2), "float32")})
    model._scheduler.submit(call)
    with pytest.raises(StageLostError, match="the thread of lane 0 has ended: SystemExit"):
        call.answer.result(timeout=20)
    thread.join(timeout=20)
    assert not models.is_ready
    assert not models.is_model_ready("x")
    assert model.has_ended()
    assert model.close(20)
    assert health._status("") == health._status("x") == HealthCheckResponse.NOT_SERVING


@pytest.mark.slow
def test_the_server_is_not_ready_and_ends(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    log = tmp_path / "stderr"
    prefix = [
        "env",
        f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "sh",
        "-c",
        f'exec "$@" 2> {log}',
        "sh",
    ]
    body = json.dumps(skips_request())
    with (
        stagepack_server([bundles["skips"]], "--import", "killer", "--linger-s", "2", prefix=prefix) as server,
        Client("grpc", server) as client,
    ):

        def health(name: str) -> int:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http)) as connection:
                connection.request("GET", f"/v2/health/{name}")
                return connection.getresponse().status

        assert health("ready") == 200
        assert post(server.http, INFER, body)[0] == 200
        server.process.send_signal(signal.SIGUSR1)
        status, answer, _ = post(server.http, INFER, body)
        assert status == 503
        assert "the thread of lane 0 has ended: SystemExit" in answer["error"]
        assert health("ready") == 503
        assert not client.raw.is_server_ready()
        assert not client.raw.is_model_ready("skips")
        assert health("live") == 200
        assert post(server.http, INFER, body)[0] == 503
        assert server.process.wait(timeout=30) == 1
        assert "the thread of lane 0 has ended: SystemExit" in log.read_text()


def test_a_server_that_cannot_listen_leaves_no_thread(tmp_path: Path) -> None:
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "x.stagepack", stages=1)
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AddressError, match="cannot listen"):
        stagepack.serve({"x": stagepack.load(bundle)}, http_port=listener.getsockname()[1], grpc_port=0)
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("lane")]


class Lanes:
    """Runs batches in two lanes, of which one ends its thread when an input says so. Implements `BatchRunner`."""

    lanes = ((0,), (1,))
    most_batches = 3

    def begin(self, inputs: Mapping[str, Any]) -> Any:
        return dict(inputs)

    def run_stage(self, stage_number: int, values: Any, sequence: Any) -> None:
        if values["x"][0] == stage_number:
            raise SystemExit(3)

    def finish(self, values: Any, sequence: Any) -> Mapping[str, Any]:
        return values


class Elsewhere(Lanes):
    """Runs batches elsewhere, which the test ends."""

    lanes = ((0,),)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.batches: list[Future[Any]] = []

    def run_stage(self, stage_number: int, values: Any, sequence: Any) -> Any:
        super().run_stage(stage_number, values, sequence)
        self.batches.append(Future())
        return self.batches[-1]


def test_joined_calls_of_a_batch_that_fails_after_its_lane_are_answered() -> None:
    def ignore(_: CallBatch) -> None:
        pass

    runner: Any = Elsewhere()
    scheduler = Scheduler(runner, max_batch_size=2, batching_delay=10, on_start=ignore, on_end=ignore)
    joined = [QueuedCall(inputs={"x": numpy.array([-1])}, batch_key="alike") for _ in range(2)]
    for call in joined:
        scheduler.submit(call)
    while not runner.batches:
        time.sleep(0.01)
    last = QueuedCall(inputs={"x": numpy.array([0])})
    scheduler.submit(last)
    assert isinstance(last.answer.exception(timeout=20), StageLostError)
    assert not any(call.answer.done() for call in joined)  # their batch still runs
    runner.finish = lambda values, sequence: runner.batches[0].result()
    runner.batches[0].set_exception(ValueError("one of the two cannot be used"))
    assert all(isinstance(call.answer.exception(timeout=20), StageLostError) for call in joined)
    assert scheduler.close(20)


@pytest.mark.parametrize("lane_number", [0, 1])
def test_all_calls_are_answered(lane_number: int) -> None:
    def ignore(_: CallBatch) -> None:
        pass

    runner: Any = Lanes()
    scheduler = Scheduler(runner, max_batch_size=1, batching_delay=0, on_start=ignore, on_end=ignore)

    def submit(value: int) -> "Future[Mapping[str, Any]]":
        call = QueuedCall(inputs={"x": numpy.array([value])})
        scheduler.submit(call)
        return call.answer

    assert submit(-1).result(timeout=20)["x"] == -1
    assert not scheduler.failure
    answers = [submit(value) for value in (lane_number, -1, -1, -1, -1)]
    for answer in answers:
        # What the other lane had run already may be answered.
        error = answer.exception(timeout=20)
        assert error is None or isinstance(error, StageLostError)
    with pytest.raises(StageLostError, match=f"the thread of lane {lane_number} has ended: SystemExit: 3"):
        answers[0].result()
    with pytest.raises(StageLostError):
        submit(-1).result(timeout=20)
    assert scheduler.failure
    assert scheduler.close(20)
