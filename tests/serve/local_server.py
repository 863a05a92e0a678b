"""`stagepack serve` in the process of the tests: REST over ASGI, without a port, and gRPC in an event loop of the tests."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
from starlette.types import ASGIApp

from stagepack.cli import serve_command
from stagepack_serving.server import free_memory
from stagepack_serving.server import server as server_module
from stagepack_serving.server.grpc_calls import CheckedMethods
from stagepack_serving.server.http_server import REFUSAL_SECONDS
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_loading import BundleLoading
from stagepack_serving.server.rest_service import rest_application
from stagepack_serving.server.security import ServerSecurity
from tests.hostile.attack import run
from tests.process_facts import memory_bytes
from tests.serve.asgi import AsgiTransport, run_in_server_loop
from tests.serve.servers import AnyServer, stagepack_server

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
    with mock.patch.object(server_module, "check_addresses"):
        result = run("serve", *map(str, arguments))
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
        await self.methods.stop(REFUSAL_SECONDS)
