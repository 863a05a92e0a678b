"""How `stagepack serve` stops: requests that it accepted are answered first, within a time limit."""

import concurrent.futures
import contextlib
import fcntl
import http.client
import os
import pty
import re
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.serve.bundles import Bundles
from tests.serve.servers import (
    STAGEPACK,
    WITH_SIGNALS,
    Client,
    Server,
    ask_slow,
    free_ports,
    get,
    stagepack_server,
    wait_for_requests,
    wait_until_not_ready,
)
from tests.waiting import wait_until
from tools.fork_server import run_forked


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_what_was_accepted_is_answered_before_the_end(slow: Path, signal_number: int) -> None:
    with stagepack_server([slow], "--linger-s", "0.2") as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask_slow, server, 200, protocol) for protocol in ("http", "grpc", "http", "grpc")]
        wait_for_requests(server, "slow", 4)
        server.process.send_signal(signal_number)
        assert all(future.result().shape == (256, 512) for future in futures)
        assert server.process.wait(timeout=120) == 0
        assert server.answers() == {"OK": 4}


def test_an_answer_arrives_over_a_slow_link_before_the_end(slow: Path) -> None:
    with stagepack_server([slow], "--linger-s", "0") as server, slow_link(server.grpc) as port:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(ask_slow, Server(server.process, server.http, port, {}), 300, "grpc")
            wait_for_requests(server, "slow")
            server.process.send_signal(signal.SIGTERM)
            assert future.result().shape == (256, 512)
        assert server.process.wait(timeout=120) == 0


@contextlib.contextmanager
def slow_link(port: int) -> Iterator[int]:
    """The port of a proxy for one connection, which delays what the server sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def connect() -> None:
            client, _ = listener.accept()
            server.connect(("127.0.0.1", port))
            with client:
                thread = threading.Thread(target=forward, args=(client, server, 0))
                thread.start()
                forward(server, client, 0.0005)
                thread.join()

        thread = threading.Thread(target=connect)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def forward(source: socket.socket, target: socket.socket, delay: float) -> None:
    """Copy bytes until one end is closed, with a delay for each 4 kB."""
    with contextlib.suppress(OSError):
        while content := source.recv(4096):
            target.sendall(content)
            time.sleep(delay)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "signal_names", [("SIGHUP", "SIGHUP", "SIGTERM"), pytest.param(("SIGTERM", "SIGHUP"), marks=pytest.mark.slow)]
)
def test_a_hang_up_does_not_end_the_drain(slow: Path, signal_names: Any) -> None:
    with stagepack_server([slow], "--linger-s", "0") as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask_slow, server, 600)
        wait_for_requests(server, "slow")
        for signal_name in signal_names:
            server.process.send_signal(signal.Signals[signal_name])
            time.sleep(0.1)
        assert future.result().shape == (256, 512)
        assert server.process.wait(timeout=120) == 0
        assert server.answers() == {"OK": 1}


def test_requests_are_answered_after_the_terminal_closes(slow: Path) -> None:
    terminal, end_of_server = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [*WITH_SIGNALS, STAGEPACK, "serve", str(slow), "--http-port", "0", "--grpc-port", "0"]
    ends: Any = {"stdin": end_of_server, "stdout": end_of_server, "stderr": end_of_server}
    process = subprocess.Popen(command, **ends, text=True, start_new_session=True, preexec_fn=take_terminal)
    os.close(end_of_server)
    try:
        printed = ""
        while not (port := re.search(r"http://127.0.0.1:(\d+)", printed)):
            printed += os.read(terminal, 1000).decode()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            server = Server(process, int(port[1]), 0, {})
            future = pool.submit(ask_slow, server, 500)
            wait_for_requests(server, "slow")
            os.close(terminal)  # the kernel sends SIGHUP
            assert future.result().shape == (256, 512)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()


def test_a_hang_up_is_ignored_under_nohup(slow: Path) -> None:
    with stagepack_server([slow], prefix=["nohup"]) as server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        with Client("grpc", server) as client:
            assert client.raw.is_server_ready()
        assert server.stop() == 0


def test_a_run_that_was_given_up_does_not_hold_the_end(slow: Path) -> None:
    with stagepack_server([slow], "--deadline-s", "0.3", "--linger-s", "0", "--drain-s", "60") as server:
        with pytest.raises(InferenceServerException):
            ask_slow(server, 50_000)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 8
        assert server.last_line() == {"answers": {"TOO_LATE": 1}, "dropped": {"requests": 0, "runs": 1}}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_is_not_done_when_the_drain_ends_is_refused(slow: Path, protocol: str) -> None:
    with (
        stagepack_server([slow], "--linger-s", "0", "--drain-s", "1") as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(ask_slow, server, 50_000, protocol)
        wait_for_requests(server, "slow")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 8
        error = future.exception()
        assert isinstance(error, InferenceServerException)
        assert error.status() in ("504", "StatusCode.DEADLINE_EXCEEDED")
        assert server.last_line() == {"answers": {"TOO_LATE": 1}, "dropped": {"requests": 1, "runs": 1}}


def test_a_second_signal_ends_at_once(slow: Path) -> None:
    with stagepack_server([slow]) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask_slow, server, 10_000)
        wait_for_requests(server, "slow")
        server.process.send_signal(signal.SIGTERM)
        wait_until_not_ready(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) != 0
        assert future.exception() is not None


def test_it_says_that_it_stops(slow: Path) -> None:
    with stagepack_server([slow], "--linger-s", "3") as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until_not_ready(server)
        status, _, headers = get(server.http, "/v2/health/ready")
        assert (status, headers["connection"]) == (503, "close")
        assert ask_slow(server, 1).shape == (256, 512)
        assert server.process.wait(timeout=120) == 0


@pytest.mark.process
@pytest.mark.parametrize(
    "redirection", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", "2>&-"))]
)
def test_closed_streams_are_no_sockets(bundles: Bundles, redirection: str) -> None:
    (port,) = free_ports(1)
    line = f'exec "$@" {redirection}'
    options = ("--http-port", str(port), "--grpc-port", "0", "--linger-s", "0")
    command = ["sh", "-c", line, "sh", STAGEPACK, "serve", str(bundles["skips"]), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until(lambda: is_ready(port))
        finally:
            process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


def is_ready(port: int) -> bool:
    """Whether the server at a port takes requests."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return get(port, "/v2/health/ready")[0] == 200
    return False


ON_A_FULL_DISK = """
import os
from stagepack.cli import main

os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
main()
"""


@pytest.mark.process
def test_full_disk_for_standard_output_is_one_line(bundles: Bundles, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(ON_A_FULL_DISK)
    arguments = ("serve", str(bundles["skips"]), "--http-port", "0", "--grpc-port", "0")
    result = run_forked(*arguments, script=script)
    assert result.returncode == 1
    assert result.stderr == "stagepack: standard output: No space left on device\n"
