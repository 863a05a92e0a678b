"""Parsing of gRPC messages with an answer to bytes that are no message."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stagepack_serving.server.errors import RequestStatus
from stagepack_serving.server.grpc_calls import OpenCalls


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Parses requests in the place of grpc, which would report bytes that are no message as an unknown error of the server."""

    def __init__(self, open_calls: OpenCalls) -> None:
        """Create the interceptor.

        Args:
            open_calls: counts the calls.
        """
        self._open_calls = open_calls

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wrap the handler of a method.

        Args:
            continuation: finds the handler.
            details: the name of the method.

        Returns:
            A handler that takes bytes instead of messages; None if the service has no such method.
        """
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary is not None:

            async def answer_request(content: bytes, context: Any) -> Any:
                await self._open_calls.add(context)
                request = await _parse(handler, content, context)
                try:
                    return await handler.unary_unary(request, context)
                except NotImplementedError:
                    # The generated class raises it in methods that GrpcService does not define.
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server does not support {details.method}")

            return grpc.unary_unary_rpc_method_handler(answer_request, None, handler.response_serializer)

        if handler.unary_stream is not None:

            async def answer_request_by_stream(content: bytes, context: Any) -> AsyncIterator[Any]:
                await self._open_calls.add(context)
                request = await _parse(handler, content, context)
                async for response in handler.unary_stream(request, context):
                    yield response

            return grpc.unary_stream_rpc_method_handler(answer_request_by_stream, None, handler.response_serializer)

        async def answer_stream(contents: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            await self._open_calls.add(context)

            async def requests() -> AsyncIterator[Any]:
                async for content in contents:
                    yield await _parse(handler, content, context)

            async for response in handler.stream_stream(requests(), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(answer_stream, None, handler.response_serializer)


async def _parse(handler: Any, content: bytes, context: Any) -> Any:
    """The message in the bytes of a request; aborts the call if there is none."""
    try:
        return handler.request_deserializer(content)
    except DecodeError as error:
        message = f"the request is not a message of the protocol: {error}"
        await context.abort(RequestStatus.BAD_REQUEST.grpc_code, message)
