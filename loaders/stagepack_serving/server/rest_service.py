"""The protocol over HTTP.

Sources: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md, and Triton's extensions in
https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from stagepack_serving.server import openapi_schemas as answers
from stagepack_serving.server.access_log import RecordedRequests
from stagepack_serving.server.adapter_control import LoadLoraRequest, UnloadLoraRequest
from stagepack_serving.server.errors import RequestError, refusal_fields, refusal_headers
from stagepack_serving.server.extensions import server_extensions
from stagepack_serving.server.log_settings import log_settings, update_log_settings
from stagepack_serving.server.metadata import message_fields, server_metadata
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.openapi import INFERENCE_REFUSALS, MODEL_PATHS, Endpoint, endpoints_page, openapi_document
from stagepack_serving.server.parameters import refuse_load_parameters
from stagepack_serving.server.rest_connections import ConnectionCloser
from stagepack_serving.server.rest_inference import InferenceRoute
from stagepack_serving.server.rest_pages import PagePace, SharedPage, metrics_page
from stagepack_serving.server.rest_request import RequestHeader, read_fields, requested_model
from stagepack_serving.server.security import TokenCheck, TokenGuard
from stagepack_serving.server.weight_updates import UpdateRequest

_PATHS: Final = {
    "protocol": "/v2",
    "openai": "/v1/models",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "metrics": "/metrics",
}


class IndexRequest(msgspec.Struct, kw_only=True):
    """The body of a request for the index."""

    ready: bool = False


class LoadRequest(msgspec.Struct, kw_only=True):
    """The body of a request to load a model."""

    parameters: dict[str, Any] = {}


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The body of a request to unload a model. Its parameter ``unload_dependents`` has no effect: there are no ensembles."""

    parameters: dict[str, Any] = {}


def rest_application(control: ModelControl, check_token: TokenCheck | None = None) -> ASGIApp:
    """Build the ASGI application of the server."""
    models, pace = control.models, PagePace()

    async def show_endpoints(_: Request) -> Response:
        return HTMLResponse(page)

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    endpoints = [
        *_server_endpoints(control, pace),
        *itertools.chain.from_iterable(_model_endpoints(models, path) for path in MODEL_PATHS),
        *_repository_endpoints(control, pace),
        *itertools.chain.from_iterable(extension.endpoints(models) for extension in server_extensions()),
    ]
    # The pages of the endpoints describe themselves too.
    endpoints += [
        Endpoint("/docs", "A page of all paths", pace.keep(show_endpoints), "text/html"),
        Endpoint("/openapi.json", "This document", pace.keep(show_document), dict[str, Any]),
    ]
    page = endpoints_page(endpoints)
    # Once: encoding it takes 10 ms.
    document = msgspec.json.encode(openapi_document(endpoints, requires_token=check_token is not None))
    application = _application(endpoints)
    if check_token is not None:
        application = TokenGuard(application, check_token, models.metrics)
    return RecordedRequests(ConnectionCloser(application, models))


def operator_application(models: ModelRegistry, is_live: Callable[[], bool]) -> ASGIApp:
    """Build the ASGI application of the operator's port."""
    endpoints = [*_health_endpoints(models, is_live), _metrics_endpoint(models, PagePace())]
    return ConnectionCloser(_application(endpoints), models)


def _application(endpoints: Sequence[Endpoint]) -> ASGIApp:
    exception_handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        RequestError: _request_error_response,
        HTTPException: _http_error_response,
        Exception: _bug_response,
    }
    routes = [endpoint.route() for endpoint in endpoints]
    starlette = Starlette(routes=routes, exception_handlers=exception_handlers)
    starlette.router.redirect_slashes = False
    return starlette


def _health_endpoints(models: ModelRegistry, is_live: Callable[[], bool]) -> list[Endpoint]:
    return [
        Endpoint("/v2/health/live", "Whether the process runs", _ready(lambda _: is_live())),
        Endpoint("/v2/health/ready", "Whether the server takes requests", _ready(lambda _: models.is_ready)),
    ]


def _metrics_endpoint(models: ModelRegistry, pace: PagePace) -> Endpoint:
    page = SharedPage(lambda: metrics_page(models.metrics.registry))

    async def metrics(_: Request) -> Response:
        return Response(await page.content(), media_type=CONTENT_TYPE_LATEST)

    return Endpoint("/metrics", "Metrics for Prometheus", pace.keep(metrics), "text/plain")


def _server_endpoints(control: ModelControl, pace: PagePace) -> list[Endpoint]:
    models, metadata = control.models, server_metadata()
    index = {"name": metadata["name"], "version": metadata["version"], **_PATHS}

    async def change_log_settings(request: Request) -> Response:
        changes = await read_fields(request, dict[str, Any])
        if changes:
            control.check_changes_allowed()
        return JSONResponse(update_log_settings(changes))

    settings = answers.LogSettings
    return [
        Endpoint("/", "Where the protocols of the server are", _json(lambda _: index), dict[str, str]),
        Endpoint(
            "/v2", "Name, version and extensions of the server", _json(lambda _: metadata), answers.ServerMetadata
        ),
        *_health_endpoints(models, lambda: True),
        Endpoint(
            "/v2/models/stats",
            "What all models have done",
            pace.keep(_json(lambda _: models.statistics("", ""))),
            answers.StatisticsAnswer,
        ),
        Endpoint("/v2/logging", "Which levels are logged", _json(lambda _: log_settings()), settings),
        Endpoint(
            "/v2/logging", "Change which levels are logged", change_log_settings, settings, dict[str, Any], (400, 403)
        ),
        _metrics_endpoint(models, pace),
    ]


def _model_endpoints(models: ModelRegistry, path: str) -> list[Endpoint]:
    def is_ready(request: Request) -> bool:
        return models.is_model_ready(*requested_model(request))

    def metadata(request: Request) -> Any:
        names = models.find_named(*requested_model(request)).adapters.names
        adapters = {"parameters": {"adapters": names}} if names else {}
        return models.metadata(*requested_model(request)) | adapters

    def config(request: Request) -> Any:
        return message_fields(models.find_named(*requested_model(request)).config())

    def statistics(request: Request) -> Any:
        return models.statistics(*requested_model(request))

    inference = "Run a model. Tensors may follow the JSON as bytes: the binary tensor extension"
    return [
        Endpoint(path, "Names, types and shapes of a model", _json(metadata), answers.ModelMetadata, refusals=(404,)),
        Endpoint(f"{path}/ready", "Whether a model takes requests", _ready(is_ready), refusals=(404,)),
        Endpoint(f"{path}/config", "Configuration as Triton writes it", _json(config), dict[str, Any], refusals=(404,)),
        Endpoint(
            f"{path}/stats",
            "What versions of a model have done",
            _json(statistics),
            answers.StatisticsAnswer,
            refusals=(404,),
        ),
        Endpoint(
            f"{path}/infer",
            inference,
            InferenceRoute(models),
            answers.InferenceAnswer,
            RequestHeader,
            INFERENCE_REFUSALS,
        ),
    ]


def _repository_endpoints(control: ModelControl, pace: PagePace) -> list[Endpoint]:
    async def index(request: Request) -> Response:
        fields = await read_fields(request, IndexRequest)
        return JSONResponse(await control.index(ready_only=fields.ready))

    async def load(request: Request) -> Response:
        refuse_load_parameters((await read_fields(request, LoadRequest)).parameters)
        await control.load(request.path_params["model"])
        return JSONResponse({})

    async def unload(request: Request) -> Response:
        await read_fields(request, UnloadRequest)
        await control.unload(request.path_params["model"])
        return JSONResponse({})

    async def update(request: Request) -> Response:
        fields = await read_fields(request, UpdateRequest)
        return JSONResponse(await control.updates.update(request.path_params["model"], fields.parameters))

    async def load_lora(request: Request) -> Response:
        fields = await read_fields(request, LoadLoraRequest)
        await control.adapters.load(fields)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload_lora(request: Request) -> Response:
        fields = await read_fields(request, UnloadLoraRequest)
        await control.adapters.unload(fields.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    path, entries, nothing = "/v2/repository", list[answers.IndexEntry], dict[str, Any]
    return [
        Endpoint(
            f"{path}/index", "Models, versions and their states", pace.keep(index), entries, IndexRequest, (400, 500)
        ),
        Endpoint(
            f"{path}/models/{{model}}/load",
            "Load the newest version of a model, or an adapter",
            load,
            nothing,
            LoadRequest,
            (400, 403, 404, 500),
        ),
        Endpoint(
            f"{path}/models/{{model}}/update",
            "Update the weights of a model while it answers",
            update,
            answers.UpdateAnswer,
            UpdateRequest,
            (400, 403, 404, 503),
        ),
        Endpoint(
            f"{path}/models/{{model}}/unload",
            "Unload a model, or an adapter",
            unload,
            nothing,
            UnloadRequest,
            (400, 403, 404),
        ),
        Endpoint(
            "/v1/load_lora_adapter",
            "Load an adapter: vLLM's API",
            load_lora,
            "text/plain",
            LoadLoraRequest,
            (400, 403, 404),
        ),
        Endpoint(
            "/v1/unload_lora_adapter",
            "Unload an adapter: vLLM's API",
            unload_lora,
            "text/plain",
            UnloadLoraRequest,
            (400, 403, 404),
        ),
    ]


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers with JSON."""

    async def handle(request: Request) -> Response:
        return JSONResponse(answer(request))

    return handle


def _ready(is_ready: Callable[[Request], bool]) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose status says whether something is ready."""

    async def handle(request: Request) -> Response:
        return Response(status_code=200 if is_ready(request) else 503)

    return handle


async def _request_error_response(request: Request, error: RequestError) -> Response:
    refusal = _refusal(request, str(error), error.status.http_code, error.code, error.field_name)
    refusal.headers.update(refusal_headers(error.status.http_code, error.retry_seconds))
    return refusal


async def _http_error_response(request: Request, error: HTTPException) -> Response:
    """The answer to an unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = _refusal(request, message, error.status_code, "unknown_url" if error.status_code == 404 else None)
    refusal.headers.update(error.headers or {})  # for an unknown method, they name the methods of the path
    return refusal


async def _bug_response(request: Request, error: Exception) -> Response:
    """The answer after an unexpected error; starlette raises it again, and uvicorn logs the traceback."""
    return _refusal(request, f"a bug in stagepack: {type(error).__name__}: {error}", 500)


def _refusal(
    request: Request, message: str, http_code: int, code: str | None = None, field_name: str | None = None
) -> Response:
    fields = refusal_fields(request.url.path, message, http_code, code, field_name)
    return JSONResponse(fields, http_code, refusal_headers(http_code))
