"""An HTTP server of a folder, with ranges, that fails and lies as a test asks."""

import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


@dataclass
class Reply:
    """The answer to one request. A test changes it before it is sent."""

    body: bytes  # the bytes that are sent
    status: int  # the HTTP status
    headers: dict[str, str]  # the headers; without a Content-Length, the connection is closed at the end of the body
    piece_bytes: int = 2**20  # the body is sent in pieces of this size
    pause_seconds: float = 0.0  # before each piece
    sent_bytes: int | None = None  # the connection is closed after so many bytes of the body; None for all


# Changes the answer to the n-th request, from 0, for a file of the name.
Misbehavior = Callable[[str, int, Reply], Any]


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Print nothing when a client has gone."""


@dataclass
class HttpServer:
    """The server, which serves in threads while it is used as a context."""

    folder: Path  # what it serves
    misbehave: Misbehavior = lambda _name, _index, _reply: None  # changes answers
    has_ranges: bool = True  # it answers requests for ranges, and not with whole files
    required_token: str | None = None  # what the header Authorization must have after ``Bearer``; None for nothing
    requests: Counter[str] = field(default_factory=Counter)  # how many requests there were for each name
    ranges: list[tuple[str, str]] = field(default_factory=list)  # the ranges that were asked for, by name
    sent: Counter[str] = field(default_factory=Counter)  # how many bytes of bodies were sent, by name
    headers: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # those of all requests
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def url(self) -> str:
        scheme = "https" if isinstance(self._server.socket, ssl.SSLSocket) else "http"
        return f"{scheme}://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        file_name = handler.path.partition("?")[0].rpartition("/")[2]
        with self.lock:
            index = self.requests[file_name]
            self.requests[file_name] += 1
            self.headers.append((file_name, dict(handler.headers)))
            if "Range" in handler.headers:
                self.ranges.append((file_name, handler.headers["Range"]))
        reply = self._reply(handler)
        self.misbehave(file_name, index, reply)
        handler.send_response(reply.status)
        if "Content-Length" not in reply.headers or reply.sent_bytes is not None:
            handler.close_connection = True
            reply.headers.setdefault("Connection", "close")
        for header, value in reply.headers.items():
            handler.send_header(header, value)
        handler.end_headers()
        self._send(handler, file_name, reply)

    def _reply(self, handler: BaseHTTPRequestHandler) -> Reply:
        path = self.folder / handler.path.partition("?")[0].lstrip("/")
        if self.required_token and handler.headers.get("Authorization") != f"Bearer {self.required_token}":
            return Reply(b"", 401, {"Content-Length": "0"})
        if not path.is_file():
            return Reply(b"no such file", 404, {"Content-Length": "12"})
        content = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", "")) if self.has_ranges else None
        if match is None:
            return Reply(content, 200, {"Content-Length": str(len(content))})
        first, last = int(match[1]), min(int(match[2]), len(content) - 1)
        if first >= len(content):
            return Reply(b"", 416, {"Content-Length": "0", "Content-Range": f"bytes */{len(content)}"})
        body = content[first : last + 1]
        content_range = f"bytes {first}-{last}/{len(content)}"
        return Reply(body, 206, {"Content-Length": str(len(body)), "Content-Range": content_range})

    def _send(self, handler: BaseHTTPRequestHandler, file_name: str, reply: Reply) -> None:
        body = reply.body if reply.sent_bytes is None else reply.body[: reply.sent_bytes]
        try:
            for start in range(0, len(body), reply.piece_bytes):
                if reply.pause_seconds:
                    time.sleep(reply.pause_seconds)
                piece = body[start : start + reply.piece_bytes]
                handler.wfile.write(piece)
                with self.lock:
                    self.sent[file_name] += len(piece)
        except OSError:  # the client has gone
            handler.close_connection = True
