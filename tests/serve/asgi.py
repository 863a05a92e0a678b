"""Clients of an ASGI application: the loop in which it answers, and the transport that calls it."""

import asyncio
import functools
import io
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import httpx2
from starlette.types import ASGIApp, Message

from stagepack_serving.server.grpc_calls import GrpcLoop

Answer = TypeVar("Answer")
# Uvicorn hands over a body in parts of at most this size.
_PART_BYTES = 65_536


@functools.cache
def _server_loop() -> asyncio.AbstractEventLoop:
    """The loop of all servers, in a thread of its own: with a second loop, grpc would wake both for each event."""
    loop = GrpcLoop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


def run_in_server_loop(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine in the loop of the servers, from another thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, _server_loop()).result()


class AsgiTransport(httpx2.BaseTransport):
    """Calls an application in the loop of the servers; `httpx2.ASGITransport` would have an answer only when it is whole."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = _Exchange(request, self._application)
        head = exchange.next_message()
        return httpx2.Response(head["status"], headers=head["headers"], stream=exchange)


class _Exchange(httpx2.SyncByteStream):
    """One request, and the parts of its answer as they come. The client hangs up when it closes the answer before its end."""

    def __init__(self, request: httpx2.Request, application: ASGIApp) -> None:
        content = request.read()
        self._parts = [content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES)] or [b""]
        self._seconds: float = request.extensions["timeout"]["read"]
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_over = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 50_000),
            "scheme": "http",
            "method": request.method,
            "root_path": "",
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }
        self._answer = asyncio.run_coroutine_threadsafe(self._run(application, scope), _server_loop())

    async def _run(self, application: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await application(scope, self._receive, self._send)
        finally:
            self._messages.put({"type": "end"})

    async def _receive(self) -> Message:
        if not self._parts:
            await self._is_over.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}

    async def _send(self, message: Message) -> None:
        self._messages.put(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_over.set()

    def next_message(self) -> Message:
        """The next message of the answer; the error of the application if it has ended before."""
        try:
            message = self._messages.get(timeout=self._seconds)
        except queue.Empty:
            raise httpx2.ReadTimeout("no answer") from None
        if message["type"] == "end":
            self._answer.result()
            raise httpx2.RemoteProtocolError("the answer is not whole")
        return message

    def __iter__(self) -> Iterator[bytes]:
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = self.next_message()
            yield message.get("body", b"")

    def close(self) -> None:
        _server_loop().call_soon_threadsafe(self._is_over.set)


class TritonStub:
    """What `tritonclient.http` calls of geventhttpclient."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def get(self, request_uri: str, headers: Mapping[str, Any] | None = None) -> "_TritonAnswer":
        return self._ask("GET", request_uri, None, headers)

    def post(self, request_uri: str, body: Any, headers: Mapping[str, Any] | None = None) -> "_TritonAnswer":
        return self._ask("POST", request_uri, body, headers)

    def _ask(self, method: str, request_uri: str, body: Any, headers: Mapping[str, Any] | None) -> "_TritonAnswer":
        texts = {name: str(value) for name, value in (headers or {}).items()}
        return _TritonAnswer(self._client.request(method, f"/{request_uri.lstrip('/')}", content=body, headers=texts))

    def close(self) -> None:
        """Leave the client to the server."""


class _TritonAnswer(io.BytesIO):
    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(response.content)
        self.status_code, self.get = response.status_code, response.headers.get

    def read(self, length: int | None = None) -> bytes:
        return super().read(length)
