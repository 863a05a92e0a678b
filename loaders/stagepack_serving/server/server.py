"""A server of REST and gRPC on one event loop, from its start until its last answer."""

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import uvloop
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from stagepack.errors import OptionError, StageLostError
from stagepack_loaders.entry_points import EntryPointPipelines
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.python_process import kept_signal_handlers
from stagepack_serving.server.bundle_listings import fixed_bundles
from stagepack_serving.server.errors import AddressError
from stagepack_serving.server.free_memory import give_back_when_quiet
from stagepack_serving.server.grpc_calls import CheckedMethods, GrpcLoop
from stagepack_serving.server.grpc_limits import MAX_CONNECTION_CALLS, MAX_RECEIVED_CALLS
from stagepack_serving.server.grpc_service import INFERENCE_SERVICE, GrpcService, HealthService
from stagepack_serving.server.http_server import (
    KEEP_ALIVE_SECONDS,
    REFUSAL_SECONDS,
    create_http_server,
    listen,
    serving_in_thread,
)
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_loading import PipelineLoading
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.rest_service import operator_application, rest_application
from stagepack_serving.server.security import ServerSecurity, read_security, watch_files

_LOG: Final = logging.getLogger("stagepack.serve")
# For threads to end that work for nobody.
_ABANDONED_SECONDS: Final = 1
# How often the models are looked at.
_WATCH_SECONDS: Final = 0.2
# An event loop that has not run for so long does not live.
_LIVE_SECONDS: Final = 10.0
# Files of the process, beside those of connections.
_OTHER_FILES: Final = 1000
_LARGEST_PORT: Final = 65_535


def watch_stop_signals() -> asyncio.Future[signal.Signals]:
    """Install handlers for SIGTERM, SIGINT and SIGHUP.

    After SIGTERM or SIGINT, the next one of them has its default action, which ends the process at once. A hang-up never does: a shell
    and the kernel both send SIGHUP when a terminal closes, and systemd sends it right after SIGTERM (``SendSIGHUP=``). A process that
    was started with SIGHUP ignored, as by nohup, keeps ignoring it.
    """
    loop = asyncio.get_running_loop()
    first_signal: asyncio.Future[signal.Signals] = loop.create_future()
    termination_signals = (signal.SIGTERM, signal.SIGINT)

    def stop(received_signal: signal.Signals) -> None:
        if not first_signal.done():
            first_signal.set_result(received_signal)
        if received_signal in termination_signals:
            for termination_signal in termination_signals:
                loop.remove_signal_handler(termination_signal)

    for termination_signal in termination_signals:
        loop.add_signal_handler(termination_signal, stop, termination_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
    return first_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddresses:
    """The addresses of a server. A port 0 chooses a free one; None for no port of the operator."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    operator_port: int | None = None


def serve(
    control: ModelControl,
    addresses: ServerAddresses,
    on_listening: Callable[[ServerAddresses], None],
    security: ServerSecurity,
) -> bool:
    """Answer requests until SIGTERM, SIGHUP or SIGINT, or until a model has ended; then finish those that were accepted.

    After SIGTERM, which orchestrators send, or SIGHUP, or when a model has ended, the server still accepts requests for
    `ServerLimits.linger` seconds, reports that it is not ready, and closes each HTTP connection with its answer. A second SIGTERM or SIGINT
    ends the process at once.
    """
    with kept_signal_handlers():
        # For a request over gRPC, the event loop of asyncio makes some 200 calls of Python, that of uvloop none.
        return uvloop.run(_serve(control, addresses, on_listening, security), loop_factory=GrpcLoop)


async def _serve(
    control: ModelControl,
    addresses: ServerAddresses,
    on_listening: Callable[[ServerAddresses], None],
    security: ServerSecurity,
) -> bool:
    models, limits = control.models, control.models.limits
    _raise_file_limit(2 * limits.max_connections + _OTHER_FILES)
    async with contextlib.AsyncExitStack() as closing:
        http_socket = closing.enter_context(listen(addresses.host, addresses.http_port))
        grpc_server, methods, grpc_port = create_grpc_server(control, addresses, security)
        application = rest_application(control, security.check_token)
        http_server = create_http_server(application, limits, None if security.tls is None else security.tls.context)
        stop_signal = watch_stop_signals()
        await grpc_server.start()
        http_task = asyncio.create_task(http_server.serve(sockets=[http_socket]))
        closing.push_async_callback(_end_at_once, grpc_server, http_task)
        http_port, operator_port = http_socket.getsockname()[1], None
        heartbeat = _Heartbeat()
        if addresses.operator_port is not None:
            operator_socket = closing.enter_context(listen(addresses.host, addresses.operator_port, "the operator"))
            operator_port = operator_socket.getsockname()[1]
            pages = operator_application(models, heartbeat.is_heard)
            closing.enter_context(serving_in_thread(operator_socket, pages, limits))
        ports = {"http_port": http_port, "grpc_port": grpc_port, "operator_port": operator_port}
        on_listening(ServerAddresses(host=addresses.host, **ports))
        failure = asyncio.create_task(_wait_for_end(models, heartbeat))
        watching = start_watching(control, security)
        stops: list[asyncio.Future[Any]] = [stop_signal, failure]
        await asyncio.wait(stops, return_when=asyncio.FIRST_COMPLETED)
        models.has_failed = failure.done()
        if models.has_failed or stop_signal.result() != signal.SIGINT:
            models.is_stopping = True
            await asyncio.sleep(limits.linger)
        models.is_stopping = True
        for task in watching:
            task.cancel()
        models.stopping.set()
        http_server.should_exit = True
        expiry = asyncio.get_running_loop().call_later(limits.drain, models.expire_requests)
        await asyncio.gather(methods.stop(limits.drain + REFUSAL_SECONDS), http_task)
        expiry.cancel()
    # All answers are out: nobody waits for what still runs.
    return control.close(_ABANDONED_SECONDS)


def start_watching(control: ModelControl, security: ServerSecurity) -> list[asyncio.Task[None]]:
    """Start what looks after models, the files of TLS and tokens, and free memory, until it is cancelled."""
    watches = (control.watch(), watch_files(security.watched_files), give_back_when_quiet(control.models))
    return [_watch(watch) for watch in watches]


def _watch(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that goes on until it is cancelled; the log says if a bug ends it."""
    task = asyncio.create_task(coroutine)

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a watch of the server has ended by a bug in stagepack", exc_info=error)

    task.add_done_callback(report)
    return task


async def _end_at_once(grpc_server: grpc.aio.Server, http_task: asyncio.Task[None]) -> None:
    """End both servers where something else has failed; nothing if they have ended."""
    http_task.cancel()
    await asyncio.gather(grpc_server.stop(0), http_task, return_exceptions=True)


class _Heartbeat:
    """Says to another thread whether the event loop runs."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def is_heard(self) -> bool:
        return time.monotonic() - self.time < _LIVE_SECONDS


def _raise_file_limit(file_count: int) -> None:
    """Raise the limit of open files, often 1,024, as far as the process may: beyond it, no connection is accepted."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = file_count if hard_limit == resource.RLIM_INFINITY else min(file_count, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))


async def _wait_for_end(models: ModelRegistry, heartbeat: _Heartbeat) -> None:
    """Wait until a model will answer no requests any more."""
    while not any(model.has_ended() for model in models.serving):
        heartbeat.time = time.monotonic()
        await asyncio.sleep(_WATCH_SECONDS)


def create_grpc_server(
    control: ModelControl, addresses: ServerAddresses, security: ServerSecurity
) -> tuple[grpc.aio.Server, CheckedMethods, int]:
    """Return a gRPC server that is not started yet, its methods, and its port."""
    models = control.models
    options = [
        ("grpc.max_receive_message_length", models.limits.max_request_bytes),
        ("grpc.max_send_message_length", -1),
        # With it, a second server could listen at the same port, and take some of the requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", models.limits.max_connections),
        # Until TLS and the preface of HTTP/2 are done.
        ("grpc.server_handshake_timeout_ms", math.ceil(1000 * models.limits.first_request)),
        # The client connects again with its next call.
        ("grpc.max_connection_idle_ms", 1000 * KEEP_ALIVE_SECONDS),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
        ("grpc.server.max_pending_requests", MAX_RECEIVED_CALLS),
        # Between the two numbers, grpc cancels some calls, and more the nearer their number is to the second one.
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_RECEIVED_CALLS),
    ]
    server = grpc.aio.server(options=options)
    methods = CheckedMethods(server, models, security.check_token)
    add_GRPCInferenceServiceServicer_to_server(GrpcService(control), methods)
    add_HealthServicer_to_server(HealthService(models, security.check_token), methods)
    service_names = (INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(service_names), methods)
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    address = f"{host}:{addresses.grpc_port}"
    try:
        if security.tls is not None:
            return server, methods, server.add_secure_port(address, security.tls.grpc_credentials())
        return server, methods, server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressError(f"{addresses.host} port {addresses.grpc_port}: cannot listen for gRPC: {error}") from None


def check_addresses(addresses: ServerAddresses) -> None:
    """Refuse addresses at which the server cannot listen, before models are loaded."""
    ports = {"HTTP": addresses.http_port, "gRPC": addresses.grpc_port, "the operator": addresses.operator_port}
    with contextlib.ExitStack() as closing:
        for protocol, port in ports.items():
            if port is not None:
                closing.enter_context(listen(addresses.host, port, protocol))


def _check_pipelines(pipelines: Mapping[str, CallablePipeline | EntryPointPipelines]) -> None:
    if not isinstance(pipelines, Mapping):
        raise OptionError(f"pipelines: expected a dict of pipelines by name, found {type(pipelines).__name__}")
    if not pipelines:
        raise OptionError("pipelines: expected at least one, found none")
    for name, pipeline in pipelines.items():
        if not isinstance(name, str) or not name or not name.isprintable() or "/" in name:
            raise OptionError(f"pipelines: expected a name of printable characters without '/', found {name!r}")
        if not isinstance(pipeline, CallablePipeline | EntryPointPipelines):
            raise OptionError(
                f"pipelines: expected a pipeline that stagepack.load returns for {name!r}, found {type(pipeline).__name__}"
            )


def serve_pipelines(
    pipelines: Mapping[str, CallablePipeline | EntryPointPipelines],
    *,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    operator_port: int | None = None,
    limits: ServerLimits | None = None,
    tls_certificate: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    tls_client_ca: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    check_token: Callable[[str], bool] | None = None,
    on_listening: Callable[[ServerAddresses], None] | None = None,
) -> None:
    """Serve loaded pipelines over the Open Inference Protocol, REST and gRPC, until SIGTERM, SIGHUP or SIGINT. Call it in the main thread.

    Load with ``copy=True``: then no change of the weight files costs a request time.

    Args:
        pipelines: the pipelines by the names that clients call the models; what `load_entry_points` returns is a model NAME_ENTRYPOINT for
            each entry point, and NAME for the one that generates.
        host: the address to listen at; ``0.0.0.0`` is all interfaces.
        http_port: the port for REST; 0 chooses a free one.
        grpc_port: the port for gRPC; 0 chooses a free one.
        operator_port: the port for health and metrics alone, without TLS and tokens, whose answers wait for no load; 0 chooses a free one,
            None for no such port.
        limits: the limits of the server; None for the default ones.
        tls_certificate: a PEM file with the certificate of the server, and those between it and its authority; None for no encryption.
        tls_key: a PEM file with its private key, which other users must not be able to read.
        tls_client_ca: a PEM file with the authorities whose certificates clients must have; None if clients need none.
        token_file: a file with a token on each line, one of which requests must have; None if they need none.
        check_token: says whether a token is accepted, in the place of `token_file`. It must be quick: it is called in the thread that
            answers all requests.
        on_listening: called with the addresses, free ports filled in, when the server accepts requests.

    Raises:
        OptionError: an argument has another type or range, arguments for TLS or tokens do not go together, or this is not the main thread.
        CredentialError: a file for TLS or tokens cannot be used.
        StageLostError: a model has ended: its processes were lost, or one of its threads.
        AddressError: the server cannot listen at an address.

    Examples:
        >>> stagepack.serve({"minilm": stagepack.load("minilm.stagepack", copy=True)})
    """
    _check_pipelines(pipelines)
    if threading.current_thread() is not threading.main_thread():
        raise OptionError("serve: expected the main thread, which gets the signals, found another one")
    if limits is not None and not isinstance(limits, ServerLimits):
        raise OptionError(f"limits: expected stagepack.ServerLimits, found {type(limits).__name__}")
    if not isinstance(host, str):
        raise OptionError(f"host: expected an address such as '127.0.0.1', found {host!r}")
    ports = {
        "http_port": http_port,
        "grpc_port": grpc_port,
        "operator_port": 0 if operator_port is None else operator_port,
    }
    for option_name, port in ports.items():
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= _LARGEST_PORT:
            raise OptionError(f"{option_name}: expected a number from 0 to {_LARGEST_PORT}, found {port!r}")
    for option_name, function in (("check_token", check_token), ("on_listening", on_listening)):
        if function is not None and not callable(function):
            raise OptionError(f"{option_name}: expected a function, found {function!r}")
    security = read_security(
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        token_file=token_file,
        check_token=check_token,
    )
    models = ModelRegistry(limits or ServerLimits(), Metrics())
    control = ModelControl(models, fixed_bundles(dict.fromkeys(pipelines, "")), PipelineLoading(pipelines, models))
    addresses = ServerAddresses(host=host, http_port=http_port, grpc_port=grpc_port, operator_port=operator_port)
    try:
        control.load_at_start()
        serve(control, addresses, on_listening or (lambda _: None), security)
    except BaseException:
        # Without a wait, threads that have nothing left to do could outlive the error.
        control.close(models.limits.drain)
        raise
    if models.has_failed:
        raise StageLostError("; ".join(reason for model in models if (reason := model.unavailable_reason())))
