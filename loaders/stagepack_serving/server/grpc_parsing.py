"""Parsing of gRPC messages with an answer to bytes that are no message."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.grpc_messages import check_message_size, parse_inference
from stagepack_serving.server.grpc_service import OpenCalls

# Their messages have tensors. `GrpcService` serializes their responses.
_INFERENCE_METHODS: Final = frozenset(
    {"/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"}
)


class ParsedMethods:
    """Adds the methods of services to a gRPC server, and parses their requests in the place of grpc.

    It would report bytes that are no message as an unknown error of the server. Generated code adds the methods of a service to this class
    as it would add them to a server.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        open_calls: OpenCalls,
        message_seconds: float,
        check_inference: Callable[[bytes], None],
    ) -> None:
        self._server = server
        self._open_calls = open_calls
        self._message_seconds = message_seconds
        self._check_inference = check_inference

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add nothing: generated code adds all methods a second time, with their names."""

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service.

        They are added as generic ones. For each registered one, grpc would wait for its next call with a future of its own, and a call of
        any method would begin and end the wait for all of them: 25 callbacks and 150 calls of Python for each request.
        """
        parsed_handlers = {
            method_name: self._parsed_handler(f"/{service_name}/{method_name}", handler)
            for method_name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, parsed_handlers),))

    def _parsed_handler(self, method: str, handler: Any) -> Any:
        """A handler that takes a stream of bytes in the place of a message or a stream of messages."""
        is_inference = method in _INFERENCE_METHODS
        parser = parse_inference if is_inference else handler.request_deserializer
        parse = functools.partial(_parse, parser, self._check_inference if is_inference else None)
        serialize = None if is_inference else handler.response_serializer
        if handler.unary_unary is not None:
            # As if the client sent a stream: grpc waits for ever for the message before it calls the handler of one message.
            async def answer_request(_: AsyncIterator[bytes], context: Any) -> Any:
                await self._open_calls.add(context)
                request = await parse(await self._first(context), context)
                try:
                    return await handler.unary_unary(request, context)
                except RequestError as error:
                    await context.abort(error.status.grpc_code, str(error))
                except NotImplementedError:
                    # The generated class raises it in methods that GrpcService does not define.
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server does not support {method}")

            return grpc.stream_unary_rpc_method_handler(answer_request, None, serialize)

        if handler.unary_stream is not None:

            async def answer_request_by_stream(_: AsyncIterator[bytes], context: Any) -> None:
                await self._open_calls.add(context)
                request = await parse(await self._first(context), context)
                await self._send_all(handler.unary_stream(request, context), context)

            return grpc.stream_stream_rpc_method_handler(answer_request_by_stream, None, serialize)

        async def answer_stream(contents: AsyncIterator[bytes], context: Any) -> None:
            await self._open_calls.add(context)

            async def requests() -> AsyncIterator[Any]:
                async for content in contents:
                    yield await parse(content, context)

            await self._send_all(handler.stream_stream(requests(), context), context)

        return grpc.stream_stream_rpc_method_handler(answer_stream, None, serialize)

    async def _send_all(self, responses: AsyncGenerator[Any], context: Any) -> None:
        """Send the responses of a stream; end the call if the client does not read one before the deadline."""
        # By themselves: with the first response, they would wait for a client that does not read, and the status after them.
        await context.send_initial_metadata(())
        async with contextlib.aclosing(responses):
            async for response in responses:
                try:
                    async with asyncio.timeout(self._message_seconds):
                        # Returns when the buffers of the connection have the response.
                        await context.write(response)
                except TimeoutError:
                    context.set_code(RequestStatus.TOO_LATE.grpc_code)
                    context.set_details("the client did not read an answer before the deadline")
                    return

    async def _first(self, context: Any) -> bytes:
        """The only message of a call; aborts the call if it does not come."""
        try:
            async with asyncio.timeout(self._message_seconds):
                # Not from the iterator of messages, which would be left before its end: the event loop would end it in a task of its own.
                content = await context.read()
        except TimeoutError:
            message = "the request was not complete before the deadline"
            await context.abort(RequestStatus.TOO_LATE.grpc_code, message)
        if not isinstance(content, bytes):
            await context.abort(RequestStatus.BAD_REQUEST.grpc_code, "expected a message, found none")
        return cast("bytes", content)


async def _parse(
    parser: Callable[[bytes], Any], check_inference: Callable[[bytes], None] | None, content: bytes, context: Any
) -> Any:
    """The message in the bytes of a request; aborts the call if there is none."""
    try:
        check_message_size(content, is_inference=check_inference is not None)
        if check_inference is not None:
            check_inference(content)
        return parser(content)
    except DecodeError as error:
        message = f"the request is not a message of the protocol: {error}"
        await context.abort(RequestStatus.BAD_REQUEST.grpc_code, message)
    except RequestError as error:
        await context.abort(error.status.grpc_code, str(error))
