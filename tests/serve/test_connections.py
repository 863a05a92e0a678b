"""Connections over HTTP: how many there are, what comes over them, and how they end."""

import collections
import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.serve.servers import INFER, STAGEPACK, Server, post, skips_request, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")


@pytest.mark.parametrize("head", ["Content-Length: 200000", "Content-Length: 200000\r\nExpect: 100-continue"])
def test_a_body_that_is_too_large_by_its_head(small: Server, head: Any) -> None:
    with socket.create_connection(("127.0.0.1", small.http), timeout=20) as plain:
        plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        start_time = time.monotonic()
        assert plain.recv(12) == b"HTTP/1.1 413"
        assert time.monotonic() - start_time < 3
        while plain.recv(4096):  # the server ends the connection, though the body does not come
            pass


def test_an_upload_without_end(small: Server) -> None:
    with socket.create_connection(("127.0.0.1", small.http), timeout=20) as plain:
        plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunks = itertools.repeat(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        with pytest.raises(ConnectionError):
            collections.deque(map(plain.sendall, chunks), maxlen=0)
    assert post(small.http, INFER, json.dumps(skips_request()))[0] == 200


def test_a_length_and_chunks_end_the_connection(small: Server) -> None:
    """A proxy before the server may have read another request than this one."""
    with socket.create_connection(("127.0.0.1", small.http), timeout=20) as plain:
        body = json.dumps(skips_request())
        heads = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked"
        plain.sendall(
            f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{heads}\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: plain.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")


def test_one_connection_too_many(bundles: Mapping[str, Path]) -> None:
    body = json.dumps(skips_request())
    with stagepack_server([bundles["skips"]], "--max-connections", "3") as server, contextlib.ExitStack() as stack:
        old_connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http)))
        old_connection.request("POST", INFER, body)
        assert old_connection.getresponse().read()
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.http), timeout=20))
        status, answer, response = post(server.http, INFER, body)
        assert (status, response.headers["connection"]) == (503, "close")
        assert "3 connections" in answer["error"]
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/health/live").status == 200
        old_connection.request("POST", INFER, body)
        response = old_connection.getresponse()
        assert (response.status, response.headers["connection"]) == (200, None)
        assert response.read()
        assert idle.recv(1) == b""


def test_half_a_request_is_let_go(bundles: Mapping[str, Path]) -> None:
    with stagepack_server([bundles["skips"]], "--deadline-s", "0.5") as server:
        with socket.create_connection(("127.0.0.1", server.http)) as plain:
            plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf".encode())
            assert plain.recv(100).startswith(b"HTTP/1.1 504")
        assert post(server.http, INFER, json.dumps(skips_request()))[0] == 200


def test_uploads_take_no_place_in_the_queue(bundles: Mapping[str, Path]) -> None:
    with stagepack_server([bundles["skips"]], "--max-queue", "2") as server, contextlib.ExitStack() as stack:
        for _ in range(5):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
            plain.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf".encode())
        assert post(server.http, INFER, json.dumps(skips_request()))[0] == 200


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use(small: Server, bundles: Mapping[str, Path], option: str) -> None:
    port = small.http if option == "--http-port" else small.grpc
    other_option = "--grpc-port" if option == "--http-port" else "--http-port"
    command = [STAGEPACK, "serve", str(bundles["skips"]), option, str(port), other_option, "0"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 1
    [line] = completed.stderr.splitlines()
    assert str(port) in line


def test_listens_at_home_only(small: Server) -> None:
    lines = [
        line.split()
        for table_name in ("tcp", "tcp6")
        for line in Path(f"/proc/{small.process.pid}/net/{table_name}").read_text().splitlines()[1:]
    ]
    listening = {line[1] for line in lines if line[3] == "0A"}
    ours = {address for address in listening if int(address.split(":")[1], 16) in (small.http, small.grpc)}
    assert len(ours) == 2
    assert all(address.rpartition(":")[0].endswith("0100007F") for address in ours)
