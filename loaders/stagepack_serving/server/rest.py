"""The protocol over HTTP.

Source: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md, and Triton's extensions for
binary tensors, sequences and model configuration.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.metadata import plain, server_metadata
from stagepack_serving.server.model import Model
from stagepack_serving.server.models import Models
from stagepack_serving.server.rest_connections import Ending
from stagepack_serving.server.rest_infer import Infer, named


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
                Route(f"{path}/infer", Infer(self._models), methods=["POST"]),
            ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: _refused,
            HTTPException: _unknown,
            Exception: _bug,
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False
        return Ending(application, self._models)

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

    def _find(self, request: Request) -> Model:
        return self._models.find(*named(request))


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
