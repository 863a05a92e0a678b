"""The protocol over HTTP.

Source: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md, and Triton's extensions for
binary tensors, sequences and model configuration.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagepack_loaders.serve.errors import Reason, RequestError
from stagepack_loaders.serve.metadata import plain, server_metadata
from stagepack_loaders.serve.model import Model
from stagepack_loaders.serve.models import Models
from stagepack_loaders.serve.rest_body import BINARY_HEADER, read_request, unpack, write_answer

# How many times its limit of a body that is too large is read, and forgotten, so that a client which writes first sees why.
_READ_ON = 16


class Tensors(Response):
    """An answer of JSON and tensors, which are sent from where they lie."""

    def __init__(self, header: bytes, tensors: list[memoryview]) -> None:
        """`tensors` follow the JSON of `header`."""
        self._parts = [memoryview(header), *tensors]
        headers = {"content-length": str(sum(len(part) for part in self._parts))}
        if tensors:
            headers[BINARY_HEADER] = str(len(header))
        super().__init__(
            None, headers=headers, media_type="application/octet-stream" if tensors else "application/json"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class RestServer:
    """The routes, and what answers them."""

    def __init__(self, models: Models) -> None:
        """Answer for these models."""
        self._models = models

    def application(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(path, self._model),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/config", self._config),
                Route(f"{path}/infer", self._infer, methods=["POST"]),
            ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: _refused,
            HTTPException: _unknown,
            Exception: _bug,
        }
        return self._closing(Starlette(routes=routes, exception_handlers=handlers))

    async def _live(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._models.ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._models.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _server(self, _: Request) -> Response:
        return JSONResponse(server_metadata())

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._find(request).metadata())

    async def _model_ready(self, request: Request) -> Response:
        self._find(request)
        return await self._ready(request)

    async def _config(self, request: Request) -> Response:
        return JSONResponse(plain(self._find(request).config()))

    async def _infer(self, request: Request) -> Response:
        with self._models.request(*_named(request), "rest") as (model, deadline):
            body = await self._body(request, deadline)
            fields, given = read_request(body, request.headers.get(BINARY_HEADER))
            del body
            tensors = await model.infer(given, deadline)
            return Tensors(*write_answer(model.name, model.version, fields, tensors))

    def _find(self, request: Request) -> Model:
        return self._models.find(*_named(request))

    async def _body(self, request: Request, deadline: float) -> bytearray:
        """The body of a request.

        Raises:
            RequestError: it is too large, or does not come to its end.
        """
        limit = self._models.limits.body
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        body += chunk
                    elif size > _READ_ON * limit:
                        break
                    else:
                        body.clear()
        except TimeoutError:
            raise RequestError(Reason.TOO_LATE, "the request did not come to its end before the deadline") from None
        except ClientDisconnect:
            raise RequestError(Reason.BAD_REQUEST, "the request did not come to its end") from None
        if size > limit:
            raise RequestError(Reason.TOO_LARGE, f"expected a request of at most {limit} bytes, found more")
        encoding = request.headers.get("content-encoding", "identity")
        return body if encoding == "identity" else unpack(body, encoding, limit)

    def _closing(self, application: ASGIApp) -> ASGIApp:
        """The application; once the server is told to stop, each answer ends its connection: the client is to look for another server."""

        async def closing(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                if message["type"] == "http.response.start" and not self._models.ready:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
                await send(message)

            await application(scope, receive, send_last)

        return closing


def _named(request: Request) -> tuple[str, str]:
    """The name and version of the model that a path names."""
    return request.path_params["model"], request.path_params.get("version", "")


async def _refused(_: Request, error: RequestError) -> Response:
    return JSONResponse({"error": str(error)}, status_code=error.reason.http)


async def _unknown(request: Request, error: HTTPException) -> Response:
    """A path or a method that there is not."""
    return JSONResponse(
        {"error": f"{request.method} {request.url.path}: {error.detail}"}, status_code=error.status_code
    )


async def _bug(_: Request, error: Exception) -> Response:
    """What nobody expected; the log tells where it was."""
    return JSONResponse({"error": f"a bug in stagepack: {type(error).__name__}: {error}"}, status_code=500)
