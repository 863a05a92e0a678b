"""Connections over HTTP: how many there are, what comes over them, and how they end."""

import collections
import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from tests.serve.bundles import Bundles
from tests.serve.servers import (
    INFER,
    Client,
    Server,
    begin_post,
    get,
    grpc_channel,
    post,
    skips_request,
    stagepack_server,
)
from tests.waiting import wait_until
from tools.fork_server import run_forked

# A connection that is refused is closed after this time, and not after 5 s.
GRACE = {"stagepack_serving.server.rest_connections._GRACE_SECONDS": 1.0}


@pytest.fixture(scope="module")
def hasty(bundles: Bundles) -> Iterator[Server]:
    """A server of narrow limits that closes refused connections soon."""
    options = ("--max-body-mb", "0.1", "--max-queue", "2")
    with stagepack_server([bundles["skips"]], *options, constants=GRACE) as server:
        yield server


@pytest.mark.parametrize(
    "head",
    ["Content-Length: 200000\r\nExpect: 100-continue", pytest.param("Content-Length: 200000", marks=pytest.mark.slow)],
)
def test_a_body_that_is_too_large_by_its_head(hasty: Server, head: Any) -> None:
    with socket.create_connection(("127.0.0.1", hasty.http), timeout=20) as plain:
        plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        start_time = time.monotonic()
        assert plain.recv(12) == b"HTTP/1.1 413"
        assert time.monotonic() - start_time < 3
        while plain.recv(4096):  # the server ends the connection, though the body does not come
            pass


def test_an_upload_without_end(hasty: Server) -> None:
    with socket.create_connection(("127.0.0.1", hasty.http), timeout=20) as plain:
        plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunks = itertools.repeat(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        with pytest.raises(ConnectionError):
            collections.deque(map(plain.sendall, chunks), maxlen=0)
    assert post(hasty.http, INFER, json.dumps(skips_request()))[0] == 200


def test_a_length_and_chunks_end_the_connection(hasty: Server) -> None:
    """A proxy before the server may have read another request than this one."""
    with socket.create_connection(("127.0.0.1", hasty.http), timeout=20) as plain:
        body = json.dumps(skips_request())
        heads = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked"
        request = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{heads}\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
        plain.sendall(request.encode())
        answer = b"".join(iter(lambda: plain.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")


def test_one_connection_too_many(bundles: Bundles) -> None:
    body = json.dumps(skips_request())
    with (
        stagepack_server([bundles["skips"]], "--max-connections", "3", constants=GRACE) as server,
        contextlib.ExitStack() as stack,
    ):
        old_connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http)))
        old_connection.request("POST", INFER, body)
        assert old_connection.getresponse().read()
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.http), timeout=20))
        status, answer, headers = post(server.http, INFER, body)
        assert (status, headers["connection"]) == (503, "close")
        assert "3 connections" in answer["error"]
        status, answer, headers = post(server.http, "/v1/completions", "{}")
        assert (status, answer["error"]["type"], headers["retry-after"]) == (503, "overloaded_error", "1")
        assert get(server.http, "/v2/health/live")[0] == 200
        old_connection.request("POST", INFER, body)
        response = old_connection.getresponse()
        assert (response.status, response.headers["connection"]) == (200, None)
        assert response.read()
        assert idle.recv(1) == b""
        check_grpc_connections(server)


@pytest.fixture(scope="module")
def impatient(bundles: Bundles) -> Iterator[Server]:
    """A server that does not wait for requests."""
    with stagepack_server([bundles["skips"]], "--first-request-s", "0.5", "--deadline-s", "0.5") as server:
        yield server


def seconds_until_closed(connection: socket.socket) -> float:
    """How long the other end keeps a connection open."""
    connection.settimeout(20)
    start_time = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return time.monotonic() - start_time


HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"


# HTTP/2: the preface of a client, and an empty SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\x04" + bytes(5)


def test_requests_that_do_not_come(impatient: Server) -> None:
    parts = [
        (impatient.http, b""),
        (impatient.http, b"G"),
        (impatient.http, HEALTH),
        (impatient.http, HEALTH + b"\r\n" + HEALTH),
        (impatient.grpc, b""),
        (impatient.grpc, PREFACE[:9]),
        (impatient.grpc, PREFACE),
    ]
    with contextlib.ExitStack() as stack:
        connections = []
        for port, part in parts:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(part)
            connections.append(connection)
        for connection in connections[2:4]:  # more of a head does not help
            time.sleep(0.1)
            connection.sendall(b"X-More: 1\r\n")
        for connection, (_, part) in zip(connections, parts, strict=True):
            assert seconds_until_closed(connection) < 5, part


def test_a_connection_may_be_idle_between_requests(impatient: Server) -> None:
    with socket.create_connection(("127.0.0.1", impatient.http), timeout=20) as plain:
        for seconds in (1, 0):
            plain.sendall(HEALTH + b"\r\n")
            assert plain.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(seconds)


def test_bodies_that_do_not_come(impatient: Server) -> None:
    """Requests that have a place at a model, and others."""
    with contextlib.ExitStack() as stack:
        paths = (INFER, "/v2/repository/index", "/v2/logging", "/v1/completions")
        connections = [stack.enter_context(begin_post(impatient, path, b"half", 1000)) for path in paths]
        assert all(connection.recv(100).startswith(b"HTTP/1.1 504") for connection in connections)
    wait_until(lambda: post(impatient.http, INFER, json.dumps(skips_request()))[0] == 200)


def test_messages_that_do_not_come(impatient: Server) -> None:
    def wait() -> Iterator[bytes]:
        time.sleep(1.5)
        yield b""

    with grpc_channel(impatient) as channel:
        calls = [
            channel.stream_unary(f"/inference.GRPCInferenceService/{method}").future(wait(), timeout=20)
            for method in ("ModelInfer", "ServerLive")
        ]
        for call in calls:
            assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "was not complete" in call.details()


def check_grpc_connections(server: Server) -> None:
    """The fourth connection is refused; when one of them ends, there is a place again."""
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(socket.create_connection(("127.0.0.1", server.grpc))) for _ in range(3)]
        for connection in kept:
            connection.sendall(PREFACE + SETTINGS)
            assert connection.recv(1)
        with socket.create_connection(("127.0.0.1", server.grpc)) as refused:
            assert seconds_until_closed(refused) < 5
        kept[0].close()
        wait_until(lambda: is_live_over_grpc(server), 20)


def is_live_over_grpc(server: Server) -> bool:
    """Whether a new connection is answered."""
    with Client("grpc", server) as client, contextlib.suppress(InferenceServerException):
        return bool(client.raw.is_server_live())
    return False


def test_uploads_take_no_place_in_the_queue(hasty: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):  # more than --max-queue
            stack.enter_context(begin_post(hasty, INFER, b"half", 1000))
        assert post(hasty.http, INFER, json.dumps(skips_request()))[0] == 200


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use(hasty: Server, bundles: Bundles, option: str) -> None:
    port = hasty.http if option == "--http-port" else hasty.grpc
    other_option = "--grpc-port" if option == "--http-port" else "--http-port"
    completed = run_forked("serve", str(bundles["skips"]), option, str(port), other_option, "0")
    assert completed.returncode == 1
    [line] = completed.stderr.splitlines()
    assert str(port) in line


def test_a_target_may_name_the_server(hasty: Server) -> None:
    with socket.create_connection(("127.0.0.1", hasty.http), 20) as connection:
        for target in ("http://127.0.0.1/v2/health/ready", "HTTP://other:1/v2/models/skips/ready"):
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_listens_at_home_only(hasty: Server) -> None:
    lines = [
        line.split()
        for table_name in ("tcp", "tcp6")
        for line in Path(f"/proc/{hasty.process.pid}/net/{table_name}").read_text().splitlines()[1:]
    ]
    listening = {line[1] for line in lines if line[3] == "0A"}
    ours = {address for address in listening if int(address.split(":")[1], 16) in (hasty.http, hasty.grpc)}
    assert len(ours) == 2
    assert all(address.rpartition(":")[0].endswith("0100007F") for address in ours)


def half_closed_answer(server: Server, request: bytes) -> bytes:
    """What comes after a client has sent all that it will."""
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as plain:
        plain.sendall(request)
        plain.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: plain.recv(65_536), b""))


def post_request(body: bytes, version: str = "1.1") -> bytes:
    return f"POST {INFER} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_client_that_has_sent_all_gets_its_answer(hasty: Server, version: str) -> None:
    request = post_request(json.dumps(skips_request()).encode(), version)
    # The second one follows the first, and does not wait for its answer.
    for request_count in (1, 2) if version == "1.1" else (1,):
        parts = half_closed_answer(hasty, request_count * request).split(b"HTTP/1.1 ")
        answers = [part for part in parts if part and part != b"100 Continue\r\n\r\n"]
        assert [answer[:6] for answer in answers] == [b"200 OK"] * request_count
        assert all(b'"outputs":[' in answer and answer.endswith(b"]}") for answer in answers)


def test_request_that_is_cut_short_gets_no_answer(hasty: Server) -> None:
    assert half_closed_answer(hasty, post_request(json.dumps(skips_request()).encode())[:-5]) == b""
