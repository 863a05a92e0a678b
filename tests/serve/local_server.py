"""`stagepack serve` in the process of the tests: REST over ASGI, without a port, and gRPC in an event loop of the tests."""

import asyncio
import contextlib
import functools
import logging
import os
import queue
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx2
from click.testing import CliRunner
from starlette.types import ASGIApp, Message

from stagepack.cli import main, serve_command
from stagepack.cli.model_loading import BundleLoading
from stagepack_serving.server import free_memory
from stagepack_serving.server import server as server_module
from stagepack_serving.server.grpc_calls import CheckedMethods, GrpcLoop
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.rest_service import rest_application
from stagepack_serving.server.security import ServerSecurity
from tests.process_facts import memory_bytes
from tests.serve.servers import AnyServer, stagepack_server

Answer = TypeVar("Answer")
# Uvicorn hands over a body in parts of at most this size.
_PART_BYTES = 65_536
_ANSWER_SECONDS = 60


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server in this process: a client for REST, the port of gRPC, and the models."""

    http: httpx2.Client
    grpc: int
    control: ModelControl

    @property
    def facts(self) -> Mapping[str, Any]:
        """What `stagepack serve` prints when it listens."""
        return {"models": [serve_command._model_facts(model) for model in self.control.models.serving]}

    def memory(self) -> int:
        """The memory of this process, with that of the tests."""
        return memory_bytes(os.getpid(), "VmRSS")

    def answers(self) -> dict[str, int]:
        """The counts of its answers by status, which `stagepack serve` prints at its end."""
        return dict(self.control.models.metrics.answer_counts)


@contextlib.contextmanager
def local_server(
    bundles: Sequence[str | Path], *options: str, constants: Mapping[str, float] | None = None
) -> Iterator[LocalServer]:
    """`stagepack serve` without its process: no signals, no drain, no log, no TLS. For `constants` see `ForkedCommand`."""
    with contextlib.ExitStack() as closing:
        for constant_name, value in (constants or {}).items():
            closing.enter_context(mock.patch(constant_name, value))
        # A server freezes what it has imported, and waits for 10 s where a collection would pass over many objects: the tests have many.
        closing.enter_context(mock.patch.object(BundleLoading, "_freeze_libraries"))
        closing.enter_context(mock.patch.object(free_memory, "_MANY_OBJECTS", sys.maxsize))
        logger = logging.getLogger("stagepack")
        closing.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)
        control, security = closing.enter_context(_loaded(("serve", *map(str, bundles), *options)))
        running = run_in_server_loop(_Running.start(control, security))
        closing.callback(lambda: run_in_server_loop(running.stop()))
        transport = AsgiTransport(running.application)
        client = httpx2.Client(
            transport=transport,
            base_url="http://127.0.0.1",
            timeout=_ANSWER_SECONDS,
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )
        yield LocalServer(closing.enter_context(client), running.grpc_port, control)


def serving(bundles: Sequence[str | Path], *options: str) -> contextlib.AbstractContextManager[AnyServer]:
    """A server here, or with `--processes` one in a process."""
    return stagepack_server(bundles, *options) if "--processes" in options else local_server(bundles, *options)


def refusal(*arguments: object) -> str:
    """Why `stagepack serve` does not begin to serve."""
    with mock.patch.object(serve_command, "_set_up_process"), mock.patch.object(server_module, "check_addresses"):
        result = CliRunner().invoke(main, ["serve", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    [line] = result.stderr.splitlines()
    return line


@contextlib.contextmanager
def _loaded(arguments: Sequence[str]) -> Iterator[tuple[ModelControl, ServerSecurity]]:
    """What the command has loaded when it begins to serve, which it does in the context."""
    loaded: Future[tuple[ModelControl, ServerSecurity]] = Future()
    is_over = threading.Event()

    def serve(control: ModelControl, _: object, __: object, security: ServerSecurity) -> bool:
        loaded.set_result((control, security))
        is_over.wait()
        return control.close(1) or True  # else the command would end the process

    def run() -> None:
        try:
            serve_command.command.main(list(arguments[1:]), arguments[0], standalone_mode=False)
        except BaseException as error:  # noqa: BLE001 - of another thread
            loaded.set_exception(error)

    with (
        mock.patch.multiple(server_module, serve=serve, check_addresses=lambda _: None),
        mock.patch.object(serve_command, "_set_up_process"),
    ):
        thread = threading.Thread(target=run, name="stagepack serve", daemon=True)
        thread.start()
        served = loaded.result()
    try:
        yield served
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class _Running:
    """The protocols of a server."""

    application: ASGIApp
    methods: CheckedMethods
    grpc_port: int
    control: ModelControl
    watching: Sequence[asyncio.Task[None]]

    @classmethod
    async def start(cls, control: ModelControl, security: ServerSecurity) -> "_Running":
        addresses = server_module.ServerAddresses(grpc_port=0)
        grpc_server, methods, grpc_port = server_module.create_grpc_server(control, addresses, security)
        await grpc_server.start()
        application = rest_application(control, security.check_token)
        return cls(application, methods, grpc_port, control, server_module.start_watching(control, security))

    async def stop(self) -> None:
        for task in self.watching:
            task.cancel()
        self.control.models.is_stopping = True
        self.control.models.stopping.set()
        self.control.models.expire_requests()
        await self.methods.stop(server_module.REFUSAL_SECONDS)


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
