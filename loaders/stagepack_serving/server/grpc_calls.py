"""The calls of a gRPC server: their tokens, their messages and their ends, around the methods that answer them."""

import asyncio
import contextlib
import functools
import gc
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import quote

import grpc
import uvloop
from google.protobuf.message import DecodeError

from stagepack_serving.server.access_log import RequestRecord, begin_call_record, current_record
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.grpc_limits import OpenCall, OpenCalls, ResetGuard, Result
from stagepack_serving.server.grpc_messages import named_model, parse_inference, parse_message
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.security import AuthenticationError, TokenCheck, check_authorization

# Their messages have tensors. `GrpcService` serializes their responses.
_INFERENCE_METHODS: Final = frozenset(
    {"/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"}
)
# The health of the server, and of its models if the call has a token: see `HealthService`.
_METHODS_WITHOUT_TOKEN: Final = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
# How the error of a step begins that grpc has accepted; its class also stands for steps that it has not begun.
_FAILED_STEP: Final = 'Failed "execute_batch"'
# grpc closes a connection when it has written the last answer; what the kernel has not sent by then is lost if the client writes
# meanwhile: with 512 KB answers on a busy machine, 8 of 450 clients met a reset connection.
_SENDING_SECONDS: Final = 0.5


class GrpcLoop(uvloop.Loop):
    """An event loop in which calls that their clients leave keep no memory.

    A step of a call is a read or a write. grpc frees what it allocates for one (an array of ``grpc_op``, 400 bytes) when the coroutine that
    waits for it goes on, and not if the step fails or the coroutine is cancelled: https://github.com/grpc/grpc/issues/43360. So a step that
    fails, which it does when the client is gone and the call is cancelled in any case, ends here as one without a message does, and
    `_run_to_end` waits for the steps that are given up.
    """

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future for a step of a call, or for any other work."""
        return _StepFuture(loop=self)


class _StepFuture(asyncio.Future[Any]):
    """A future that has the result None where grpc reports that a step has failed."""

    __slots__ = ()

    def set_exception(self, error: type[BaseException] | BaseException, /) -> None:
        if isinstance(error, grpc.aio.InternalError) and str(error).startswith(_FAILED_STEP):
            self.set_result(None)
        else:
            super().set_exception(error)


class CheckedMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Adds the methods of services to a gRPC server, checks the tokens of their calls, and parses their requests in the place of grpc.

    grpc would report bytes that are no message as an unknown error of the server. Generated code adds the methods of a service to this
    class as it would add them to a server.
    """

    def __init__(self, server: grpc.aio.Server, models: ModelRegistry, check_token: TokenCheck | None) -> None:
        self._server = server
        self._models = models
        self._check_token = check_token
        self._calls = OpenCalls(models.limits.max_connections)
        self._resets = ResetGuard()
        self._is_stopping = False
        self._handlers: dict[str, Any] = {}
        server.add_generic_rpc_handlers((self,))

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add nothing: generated code adds all methods a second time, with their names."""

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service.

        They are not registered at the server. For each registered one, grpc would wait for its next call with a future of its own, and a
        call of any method would begin and end the wait for all of them: 25 callbacks and 150 calls of Python for each request.
        """
        for method_name, handler in handlers.items():
            method = f"/{service_name}/{method_name}"
            self._handlers[method] = self._checked_handler(method, handler)

    def service(self, handler_call_details: Any) -> Any:
        """Find the handler of a call. Without an accepted token, a client does not learn which methods there are."""
        method = handler_call_details.method
        return self._handlers.get(method) or self._refusing_handler(method)

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, wait so long until the others are answered and the answers are sent, cancel the rest, and stop the server."""
        self._is_stopping = True
        if self._calls:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._calls.wait_until_empty(), seconds)
            await asyncio.sleep(_SENDING_SECONDS)
        await self._server.stop(0)

    def _checked_handler(self, method: str, handler: Any) -> Any:
        """A handler that takes a stream of bytes in the place of a message or a stream of messages."""
        is_inference = method in _INFERENCE_METHODS
        parse_other = functools.partial(parse_message, handler.request_deserializer)
        parse: Callable[[bytes], Any] = parse_inference if is_inference else parse_other
        serialize = None if is_inference else handler.response_serializer
        if handler.unary_unary is not None:
            # As if the client sent a stream: grpc waits for ever for the message before it calls the handler of one message.
            async def answer_request(_: AsyncIterator[bytes], context: Any) -> Any:
                call, record = self._open_call(), begin_call_record(context, method)
                try:
                    self._begin(method, context, call)
                    if is_inference:
                        await self._models.check_head("grpc", self._seconds_left(context))
                    content = await _only_message(context, call)
                    record.request_bytes = len(content)
                    if is_inference:
                        await self._models.check_head("grpc", self._seconds_left(context), *named_model(content))
                    response = await handler.unary_unary(parse(content), context)
                except (DecodeError, NotImplementedError, RequestError) as error:
                    await _abort(context, method, error)
                    return None
                except asyncio.CancelledError:
                    record.write("HUNG_UP")
                    self._resets.count(call, context.peer())
                    raise
                record.answer_bytes = len(response) if is_inference else response.ByteSize()
                call.bound_reading(context.peer(), self._models.limits.sending)
                if method not in _METHODS_WITHOUT_TOKEN:
                    record.write("OK")
                return response

            return grpc.stream_unary_rpc_method_handler(answer_request, None, serialize)

        async def answer_with_stream(_: AsyncIterator[bytes], context: Any) -> None:
            call = self._open_call(is_watch=handler.unary_stream is not None)
            begin_call_record(context, method)  # written if the call is refused: each message has a record of its own
            try:
                self._begin(method, context, call)
                if handler.unary_stream is not None:
                    responses = handler.unary_stream(parse(await _only_message(context, call)), context)
                    await call.wait(self._send_all(responses, context, call))
                else:
                    # A token may be withdrawn while the stream is open.
                    check_token = functools.partial(self._check_authorization, method, context)
                    requests = RequestStream(method, context, call, parse, check_token)
                    await self._send_all(handler.stream_stream(requests, context), context, call)
            except (DecodeError, RequestError) as error:
                await _abort(context, method, error)
            except asyncio.CancelledError:
                self._resets.count(call, context.peer())
                raise

        return grpc.stream_stream_rpc_method_handler(answer_with_stream, None, serialize)

    def _refusing_handler(self, method: str) -> Any:
        """The handler of a method that does not exist."""

        async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
            error: Exception = NotImplementedError()
            begin_call_record(context, quote(method))
            try:
                self._begin(method, context, self._open_call())
            except RequestError as refusal:
                error = refusal
            await _abort(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _open_call(self, *, is_watch: bool = False) -> OpenCall:
        limits = self._models.limits
        return OpenCall(is_watch=is_watch, idle_seconds=limits.deadline, count_refusal=self._count_refusal)

    def _seconds_left(self, context: Any) -> float:
        """The time until the deadline of a call."""
        remaining: float | None = context.time_remaining()
        return min(self._models.limits.deadline, math.inf if remaining is None else remaining)

    def _count_refusal(self) -> None:
        self._models.metrics.count_answer("", "", "grpc", RequestStatus.BUSY.name)

    def _begin(self, method: str, context: Any, call: OpenCall) -> None:
        """Count a call until it ends, unless it has no accepted token or the server is stopping or full."""
        context.add_done_callback(functools.partial(self._end_call, call))
        self._check_authorization(method, context)
        if self._is_stopping:
            self._count_refusal()
            raise RequestError(RequestStatus.BUSY, "this server is stopping: ask another one")
        try:
            self._calls.add(call, is_health=method in _METHODS_WITHOUT_TOKEN)
        except RequestError:
            self._count_refusal()
            raise

    def _end_call(self, call: OpenCall, context: Any) -> None:
        """Free the place of a call that has ended, and what grpc keeps of it."""
        self._calls.remove(call)
        # grpc keeps the callbacks of a call after it has called them. They refer to the context, and it to them: the garbage collector had
        # to find 50 objects for each of 1,600 refused calls, and all threads waited 90 ms for it.
        states = (each for each in gc.get_referents(context) if type(each).__name__ == "RPCState")
        for callbacks in gc.get_referents(*states):
            if isinstance(callbacks, list):
                callbacks.clear()

    def _check_authorization(self, method: str, context: Any) -> None:
        if self._check_token is not None and method not in _METHODS_WITHOUT_TOKEN:
            try:
                check_call_authorization(self._check_token, context)
            except AuthenticationError as error:
                self._models.metrics.count_answer("", "", "grpc", error.status.name)
                raise

    async def _send_all(self, responses: AsyncGenerator[Any], context: Any, call: OpenCall) -> None:
        """Send the responses of a stream; end the call if the client does not read one before the deadline."""
        # By themselves: with the first response, they would wait for a client that does not read, and the status after them.
        await _run_to_end(call, functools.partial(context.send_initial_metadata, ()))
        async with contextlib.aclosing(responses):
            async for response in responses:
                try:
                    with call.working():
                        async with asyncio.timeout(self._models.limits.deadline):
                            # Returns when the buffers of the connection have the response.
                            await _run_to_end(call, functools.partial(context.write, response))
                except TimeoutError:
                    context.set_code(RequestStatus.TOO_LATE.grpc_code)
                    context.set_details("the client did not read an answer before the deadline")
                    call.bound_reading(context.peer(), self._models.limits.sending)  # the status waits for it, too
                    return


class RequestStream:
    """The messages of a stream. It ends at the deadline without a request that comes or is being answered."""

    def __init__(
        self,
        method: str,
        context: Any,
        call: OpenCall,
        parse: Callable[[bytes], Any],
        check_authorization: Callable[[], None],
    ) -> None:
        self._method = method
        self._context = context
        self._call = call
        self._parse = parse
        self._message_bytes = 0
        self._check_authorization = check_authorization
        # The context in which a request is answered.
        self.working = call.working

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        content = await self._call.wait(_run_to_end(self._call, self._context.read))
        if not isinstance(content, bytes):
            raise StopAsyncIteration
        self._check_authorization()
        self._message_bytes = len(content)
        try:
            return self._parse(content)
        except DecodeError as error:
            raise _format_error(error) from None

    def begin_record(self) -> RequestRecord:
        """Begin the record of the message that has come last."""
        record = begin_call_record(self._context, self._method)
        record.request_bytes = self._message_bytes
        return record


def _run_to_end(call: OpenCall, step: Callable[[], Awaitable[Result]]) -> asyncio.Future[Result]:
    """Run a step of a call, which goes on when nobody waits for it any more: see `GrpcLoop`."""
    task = asyncio.ensure_future(_run_step(call, step))
    task.add_done_callback(_take_note_of_error)
    return asyncio.shield(task)


async def _run_step(call: OpenCall, step: Callable[[], Awaitable[Result]]) -> Result:
    """Run a step, unless its call has ended since the step was asked for: grpc must not begin it then."""
    return await step() if call.is_open else grpc.aio.EOF


def _take_note_of_error(task: asyncio.Task[Any]) -> None:
    """Let asyncio report no error of a step that nobody waits for."""
    if not task.cancelled():
        task.exception()


async def _only_message(context: Any, call: OpenCall) -> bytes:
    """The message of a call that has one."""
    # Not from the iterator of messages, which would be left before its end: the event loop would end it in a task of its own.
    content = await call.wait(_run_to_end(call, context.read))
    if not isinstance(content, bytes):
        raise BadRequestError("expected a message, found none")
    return content


def check_call_authorization(check_token: TokenCheck, context: Any) -> None:
    """Check the authorization in the metadata of a call."""
    values = [
        value if isinstance(value, str) else value.decode("latin-1")
        for key, value in context.invocation_metadata() or ()
        if key == "authorization"
    ]
    check_authorization(check_token, values)


async def _abort(context: Any, method: str, error: Exception) -> None:
    """End a call that is refused. Its method returns after that."""
    code = grpc.StatusCode.UNIMPLEMENTED
    status_name, message = code.name, f"this server does not support {method}"
    metadata: tuple[tuple[str, str], ...] = context.trailing_metadata()
    # The generated class raises NotImplementedError, too, in methods that `GrpcService` does not define.
    if not isinstance(error, NotImplementedError):
        refusal = error if isinstance(error, RequestError) else _format_error(error)
        code, status_name, message = refusal.status.grpc_code, refusal.status.name, str(refusal)
        if isinstance(refusal, AuthenticationError):
            metadata += (("www-authenticate", refusal.challenge),)
        elif refusal.status.is_temporary:
            # Clients with a retry policy wait so long: https://github.com/grpc/proposal/blob/master/A6-client-retries.md.
            metadata += (("grpc-retry-pushback-ms", str(1000 * refusal.retry_seconds)),)
    if (record := current_record.get()) is not None:
        record.write(status_name)
    try:
        await context.abort(code, message, metadata)
    except grpc.aio.AbortError as aborted:
        # grpc keeps it, and raises it again when the method has returned. The frames refer to the call.
        aborted.__traceback__ = aborted.__context__ = None


def _format_error(error: Exception) -> RequestError:
    return BadRequestError(f"the request is not a message of the protocol: {error}")
