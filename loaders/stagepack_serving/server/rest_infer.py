"""An inference over HTTP, from the first byte of the request to the last of the answer."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.models import Models
from stagepack_serving.server.rest_body import BINARY_HEADER, check_forms, read_request, unpack, write_answer

Result = TypeVar("Result")


class Infer:
    """The route of inferences, as an ASGI application: it sees the answer sent before it lets the request go."""

    def __init__(self, models: Models) -> None:
        """Answer for these models."""
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RequestError: it gets no answer.
        """
        request, sent = Request(scope, receive), []

        async def send_on(message: Message) -> None:
            sent.append(message["type"])
            await send(message)

        try:
            async with self._models.request(*named(request), "rest") as (model, deadline):
                body = await self._body(request)
                fields, given = read_request(body, request.headers.get(BINARY_HEADER))
                check_forms(fields, model.interface)
                del body
                with model.place():
                    tensors = await _unless_hung_up(model.infer(given, deadline), receive)
                    await _send(*write_answer(model.name, model.version, fields, tensors), send_on)
        except RequestError:
            if not sent:  # else who does not read the answer gets the connection closed
                raise

    async def _body(self, request: Request) -> bytearray:
        """The body of a request.

        Raises:
            RequestError: it is too large, or does not come to its end.
        """
        limit, body = self._models.limits.body, bytearray()
        size = int(request.headers.get("content-length", 0))
        try:
            if size <= limit:
                async for chunk in request.stream():
                    body += chunk
                    if (size := len(body)) > limit:
                        break
        except ClientDisconnect:
            raise RequestError(Reason.HUNG_UP, "the request did not come to its end") from None
        if size > limit:
            raise RequestError(Reason.TOO_LARGE, f"expected a request of at most {limit} bytes, found {size} or more")
        encoding = request.headers.get("content-encoding", "identity").lower()
        return body if encoding == "identity" else unpack(body, encoding, limit)


def named(request: Request) -> tuple[str, str]:
    """The name and version of the model that a path names."""
    return request.path_params["model"], request.path_params.get("version", "")


async def _unless_hung_up(answer: Awaitable[Result], receive: Receive) -> Result:
    """The answer; nobody waits for it any more when the client closes its connection.

    Raises:
        RequestError: it did.
    """
    working = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestError(Reason.HUNG_UP, "the client closed the connection")
    finally:
        for task in (working, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    """Return when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(header: bytes, content: list[memoryview], send: Send) -> None:
    """Send JSON, and the tensors that follow it from where they lie."""
    parts = [memoryview(header), *content]
    headers = [
        (b"content-type", b"application/octet-stream" if content else b"application/json"),
        (b"content-length", str(sum(map(len, parts))).encode()),
    ]
    if content:
        headers.append((BINARY_HEADER.encode(), str(len(header)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
