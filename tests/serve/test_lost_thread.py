"""A thread that runs batches ends: the server says that it is not ready, answers what waits, and ends."""

import ctypes
import gc
import json
import os
import signal
import socket
import threading
from pathlib import Path

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
from stagepack_serving.server.scheduler import QueuedCall
from stagepack_serving.server.served_model import ServedModel
from tests.serve.bundles import Bundles
from tests.serve.servers import INFER, Client, get, post, skips_request, stagepack_server

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
    model = ServedModel("x", stagepack.load(bundle), models.limits, models.metrics)
    models.serve([model])
    health = HealthService(models)
    assert models.is_ready
    assert health._status("") == health._status("x") == HealthCheckResponse.SERVING
    thread = model._scheduler._thread
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
def test_the_server_is_not_ready_and_ends(bundles: Bundles, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    log = tmp_path / "stderr"
    variable = f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    prefix = ["env", variable, "sh", "-c", f'exec "$@" 2> {log}', "sh"]
    body = json.dumps(skips_request())
    with (
        stagepack_server([bundles["skips"]], "--import", "killer", "--linger-s", "2", prefix=prefix) as server,
        Client("grpc", server) as client,
    ):
        assert get(server.http, "/v2/health/ready")[0] == 200
        assert post(server.http, INFER, body)[0] == 200
        server.process.send_signal(signal.SIGUSR1)
        status, answer, _ = post(server.http, INFER, body)
        assert status == 503
        assert "the thread of lane 0 has ended: SystemExit" in answer["error"]
        assert get(server.http, "/v2/health/ready")[0] == 503
        assert not client.raw.is_server_ready()
        assert not client.raw.is_model_ready("skips")
        assert get(server.http, "/v2/health/live")[0] == 200
        assert post(server.http, INFER, body)[0] == 503
        assert server.process.wait(timeout=30) == 1
        assert "the thread of lane 0 has ended: SystemExit" in log.read_text()


@pytest.mark.parametrize("taken_port", ["http_port", "grpc_port", "operator_port"])
def test_a_server_that_cannot_listen_leaves_nothing(
    taken_port: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "x.stagepack", stages=1)
    threads, stop_signals = set(threading.enumerate()), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in stop_signals]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {"http_port": 0, "grpc_port": 0, taken_port: listener.getsockname()[1]}
        with pytest.raises(AddressError, match="cannot listen"):
            stagepack.serve({"x": stagepack.load(bundle)}, **ports)
    assert [signal.getsignal(number) for number in stop_signals] == handlers
    gc.collect()  # then asyncio logs the errors of tasks that nobody has asked for
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("lane")]
