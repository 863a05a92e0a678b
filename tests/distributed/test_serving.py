"""`serve --processes`, and `serve` under torchrun: answers, faults, and an orderly end."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch
import tritonclient.http
from tritonclient.utils import InferenceServerException

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.run_trace import read_trace
from tests.distributed.bundles import tree_environment
from tests.hostile.attack import run
from tests.process_facts import child_processes
from tests.serve.servers import Server, get, http_client, refused, stagepack_server
from tests.waiting import wait_until

IDS = torch.arange(6)


@pytest.fixture(scope="module")
def expected(layers: Bundle) -> torch.Tensor:
    with torch.no_grad():
        return stagepack.load(layers)(IDS)


def ask(client: Any) -> torch.Tensor:
    ids = tritonclient.http.InferInput("ids", list(IDS.shape), "INT64").set_data_from_numpy(IDS.numpy())
    return torch.from_numpy(client.infer("layers", [ids]).as_numpy("output").copy())


def stage_process_ids(server: Server) -> list[int]:
    """The processes of the stages, which the server has started."""
    return sorted(child_processes(server.process.pid))


def is_alive(process_id: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


def test_a_lost_process_is_told_and_comes_back(layers: Bundle, expected: torch.Tensor) -> None:
    with stagepack_server([layers.path], "--processes", "2", "--max-restarts", "1") as server:
        with contextlib.closing(http_client(server.http)) as client:
            assert torch.equal(ask(client), expected)
            first_ids = stage_process_ids(server)
            assert len(first_ids) == 2
            os.kill(first_ids[1], signal.SIGKILL)
            wait_until(lambda: not client.is_server_ready(), 5)
            with refused("503", says="is lost: it ended with signal 9"):
                ask(client)
            wait_until(client.is_server_ready)
            assert torch.equal(ask(client), expected)
            second_ids = stage_process_ids(server)
            assert not set(first_ids) & set(second_ids)
            os.kill(second_ids[0], signal.SIGKILL)  # the last restart is used up: the server ends
        assert server.process.wait(timeout=20) == 1
        wait_until(lambda: not any(map(is_alive, second_ids)), 5)


class Load:
    """Clients that ask without a pause, each on a connection of its own, until the server is gone.

    Attributes:
        outcomes: the number of right and of wrong answers, and of errors by status.
    """

    def __init__(self, port: int, expected: torch.Tensor, clients: int = 8) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port = port
        self._expected = expected
        self._threads = [threading.Thread(target=self._keep_asking) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _keep_asking(self) -> None:
        with contextlib.closing(http_client(self._port)) as client, contextlib.suppress(OSError, HTTPException):
            while True:
                self.outcomes[self._ask(client)] += 1

    def _ask(self, client: Any) -> str:
        try:
            return "right" if torch.equal(ask(client), self._expected) else "wrong"
        except InferenceServerException as error:
            time.sleep(0.02)
            return str(error.status())


@pytest.mark.slow
def test_it_stops_under_load_without_losing_an_answer(layers: Bundle, expected: torch.Tensor) -> None:
    with stagepack_server([layers.path], "--processes", "3", "--linger-s", "0.2") as server:
        load = Load(server.http, expected)
        time.sleep(1.5)
        children = stage_process_ids(server)
        metrics = get(server.http)[1]
        assert 'stagepack_stage_busy_seconds_total{model="layers",stage="2",version="1"}' in metrics
        assert 'stagepack_process_sent_bytes_total{model="layers",process="1",version="1"}' in metrics
        assert server.stop() == 0
        load.wait()
        assert set(load.outcomes) == {"right"}
        assert server.answers() == {"OK": load.outcomes["right"]}
        assert load.outcomes["right"] > 50
    assert not any(map(is_alive, children))


@pytest.mark.slow
def test_torchrun_stops_under_load_without_losing_an_answer(layers: Bundle, expected: torch.Tensor) -> None:
    with torchrun_server(layers) as (process, port):
        load = Load(port, expected)
        time.sleep(1.5)
        children = child_processes(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        load.wait()
        assert process.stdout is not None
        assert set(load.outcomes) == {"right"}
        assert json.loads(process.stdout.read())["answers"] == {"OK": load.outcomes["right"]}
    assert not any(map(is_alive, children))


@pytest.mark.slow
def test_processes_killed_and_stopped_under_load(layers: Bundle, expected: torch.Tensor) -> None:
    moments = random.Random(0)  # noqa: S311 - the same moments in each run
    rounds = 6
    with stagepack_server([layers.path], "--processes", "3", "--max-restarts", str(rounds)) as server:
        load = Load(server.http, expected)
        with contextlib.closing(http_client(server.http)) as client:
            for _ in range(rounds):
                wait_until(client.is_server_ready)
                time.sleep(moments.random())
                lost_process = moments.choice(stage_process_ids(server))
                os.kill(lost_process, moments.choice([signal.SIGKILL, signal.SIGSTOP]))
                wait_until(lambda: not client.is_server_ready(), 5)
            wait_until(client.is_server_ready)
            assert torch.equal(ask(client), expected)
        children = stage_process_ids(server)
        assert server.stop() == 0
        load.wait()
        assert set(load.outcomes) == {"right", "503"}
        assert load.outcomes["right"] > 100
    assert not any(map(is_alive, children))


@contextlib.contextmanager
def torchrun_server(bundle: Bundle, *options: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """`serve` under torchrun, and its HTTP port."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *options]
    command = [*program, "-m", "stagepack", "serve", str(bundle.path), "--http-port", "0", "--grpc-port", "0", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=tree_environment(), start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield process, read_port(process)
    finally:
        workers = child_processes(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        wait_until(lambda: not any(map(is_alive, workers)), 20)  # torchrun does not end them when it is killed


def read_port(process: "subprocess.Popen[str]") -> int:
    """The HTTP port that the next server prints when it listens."""
    assert process.stdout is not None
    facts: dict[str, Any] = {}
    while "http_port" not in facts:  # a server that ends prints the counts of its answers
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], "the server ended"
        facts = json.loads("".join(lines))
    port: int = facts["http_port"]
    return port


@pytest.mark.slow
def test_torchrun_starts_all_processes_again(layers: Bundle, expected: torch.Tensor) -> None:
    with torchrun_server(layers, "--max-restarts", "1") as (process, port):
        with contextlib.closing(http_client(port)) as client:
            assert torch.equal(ask(client), expected)
        children = child_processes(process.pid)
        assert len(children) == 3
        os.kill(children[2], signal.SIGKILL)
        second_port = read_port(process)
        with contextlib.closing(http_client(second_port)) as client:
            wait_until(client.is_server_ready)
            assert torch.equal(ask(client), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "0 is not in the range"),
        (["--processes", "1", "--runtime", "onnxruntime", "--compiled", "x"], "--compiled"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, layers: Bundle) -> None:
    result = run("serve", str(layers.path), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow  # 10 s: its processes begin without torch
def test_a_server_writes_a_trace_when_it_stops(layers: Bundle, tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.json"
    with stagepack_server([layers.path], "--processes", "3", "--trace", str(trace_file)) as server:
        with contextlib.closing(http_client(server.http)) as client:
            for _ in range(5):
                ask(client)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
    trace = read_trace(trace_file)
    assert trace.bundle == layers.digest
    counts = Counter(span.stage for span in trace.spans if span.kind == "compute")
    assert counts.keys() == {0, 1, 2}
    assert len(set(counts.values())) == 1
    assert counts[0] >= 5  # and what warms up
