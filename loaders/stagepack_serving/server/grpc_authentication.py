"""Tokens of gRPC calls."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.tokens import AuthenticationError, TokenCheck, check_authorization

# The health of the server, and of its models if the call has a token: see `HealthService`.
_OPEN_METHODS: Final = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Aborts calls without an accepted token with UNAUTHENTICATED, before their messages are read.

    A token may be withdrawn while a stream is open: it is checked again for each message of a stream.
    """

    def __init__(self, check_token: TokenCheck, metrics: Metrics) -> None:
        self._check_token = check_token
        self._metrics = metrics

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Find the handler of a method, or one that aborts the call."""
        if details.method in _OPEN_METHODS:
            return await continuation(details)
        authorization = authorization_values(details.invocation_metadata)
        try:
            self._check(authorization)
        except AuthenticationError as error:
            return _refusing_handler(error)
        handler = await continuation(details)
        if handler is None or handler.stream_stream is None:
            return handler

        async def answer_stream(contents: AsyncIterator[bytes], context: Any) -> None:
            await handler.stream_stream(self._checked_messages(contents, authorization, context), context)

        return grpc.stream_stream_rpc_method_handler(answer_stream, None, handler.response_serializer)

    async def _checked_messages(
        self, contents: AsyncIterator[bytes], authorization: Sequence[str], context: Any
    ) -> AsyncIterator[bytes]:
        """The messages of a stream; aborts the call at the first one after its token was withdrawn."""
        async for content in contents:
            try:
                self._check(authorization)
            except AuthenticationError as error:
                await abort_unauthenticated(context, error)
            yield content

    def _check(self, authorization: Sequence[str]) -> None:
        """Check the authorization of a call, and count a refusal."""
        try:
            check_authorization(self._check_token, authorization)
        except AuthenticationError as error:
            self._metrics.count_answer("", "", "grpc", error.status.name)
            raise


def authorization_values(metadata: Any) -> Sequence[str]:
    """Return the values of the key ``authorization`` in the metadata of a call.

    metadata: the keys and values; None for none.
    """
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for key, value in metadata or ()
        if key == "authorization"
    ]


async def abort_unauthenticated(context: Any, error: AuthenticationError) -> None:
    """End a call that has no accepted token."""
    await context.abort(error.status.grpc_code, str(error), (("www-authenticate", error.challenge),))


def _refusing_handler(error: AuthenticationError) -> Any:
    """A handler of all kinds of methods: that of a stream is called before a message is read."""

    async def refuse(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        await abort_unauthenticated(context, error)
        yield  # pragma: no cover - makes it a generator

    return grpc.stream_stream_rpc_method_handler(refuse)
