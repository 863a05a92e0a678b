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

from stagepack_serving.server.errors import RequestError, refusal_fields
from stagepack_serving.server.generation.generate_route import GenerateRoute
from stagepack_serving.server.generation.openai_routes import openai_routes
from stagepack_serving.server.log_settings import log_settings, update_log_settings
from stagepack_serving.server.metadata import message_fields, server_metadata
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.openapi import openapi_document
from stagepack_serving.server.rest_connections import ConnectionCloser
from stagepack_serving.server.rest_index import index_routes
from stagepack_serving.server.rest_inference import InferenceRoute, requested_model
from stagepack_serving.server.rest_repository import repository_routes
from stagepack_serving.server.rest_request import read_fields
from stagepack_serving.server.security import TokenCheck, TokenGuard
from stagepack_serving.server.served_model import ServedModel


class RestService:
    """The routes of the REST protocol, and ``/metrics`` for Prometheus."""

    def __init__(self, control: ModelControl, check_token: TokenCheck | None = None) -> None:
        self._models = control.models
        self._control = control
        self._check_token = check_token

    def application(self) -> ASGIApp:
        """Build the ASGI application."""
        routes = [
            *index_routes(),
            Route("/v2", self._server_metadata),
            Route("/v2/health/live", self._server_live),
            Route("/v2/health/ready", self._server_ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            Route("/v2/logging", self._log_settings),
            Route("/v2/logging", self._update_log_settings, methods=["POST"]),
            Route("/v2/models/stats", self._statistics),
            *repository_routes(self._control),
            *openai_routes(self._models),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(path, self._model_metadata),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/config", self._model_config),
                Route(f"{path}/stats", self._statistics),
                Route(f"{path}/infer", InferenceRoute(self._models), methods=["POST"]),
                Route(f"{path}/generate", GenerateRoute(self._models, streams=False), methods=["POST"]),
                Route(f"{path}/generate_stream", GenerateRoute(self._models, streams=True), methods=["POST"]),
            ]
        exception_handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: _request_error_response,
            HTTPException: _http_error_response,
            Exception: _bug_response,
        }
        application = Starlette(routes=routes, exception_handlers=exception_handlers)
        application.router.redirect_slashes = False
        if self._check_token is None:
            return ConnectionCloser(application, self._models)
        return ConnectionCloser(TokenGuard(application, self._check_token, self._models.metrics), self._models)

    async def _server_live(self, _: Request) -> Response:
        return Response()

    async def _server_ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._models.is_ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._models.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(openapi_document(requires_token=self._check_token is not None))

    async def _log_settings(self, _: Request) -> Response:
        return JSONResponse(log_settings())

    async def _update_log_settings(self, request: Request) -> Response:
        return JSONResponse(update_log_settings(await read_fields(request, dict[str, Any])))

    async def _server_metadata(self, _: Request) -> Response:
        return JSONResponse(server_metadata())

    async def _model_metadata(self, request: Request) -> Response:
        model_name, version = requested_model(request)
        return JSONResponse(self._models.find_versions(model_name).metadata(version))

    async def _model_ready(self, request: Request) -> Response:
        is_ready = self._models.is_model_ready(*requested_model(request))
        return Response(status_code=200 if is_ready else 503)

    async def _model_config(self, request: Request) -> Response:
        return JSONResponse(message_fields(self._find_model(request).config()))

    async def _statistics(self, request: Request) -> Response:
        # The path of all models has no parameters.
        model_name, version = requested_model(request) if request.path_params else ("", "")
        return JSONResponse(self._models.statistics(model_name, version))

    def _find_model(self, request: Request) -> ServedModel:
        return self._models.find(*requested_model(request))


async def _request_error_response(request: Request, error: RequestError) -> Response:
    return _refusal(request, str(error), error.status.http_code)


async def _http_error_response(request: Request, error: HTTPException) -> Response:
    """The answer to an unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _refusal(request, message, error.status_code, "unknown_url")


async def _bug_response(request: Request, error: Exception) -> Response:
    """The answer after an unexpected error; starlette raises it again, and uvicorn logs the traceback."""
    return _refusal(request, f"a bug in stagepack: {type(error).__name__}: {error}", 500)


def _refusal(request: Request, message: str, http_code: int, code: str | None = None) -> Response:
    return JSONResponse(refusal_fields(request.url.path, message, http_code, code), http_code)
