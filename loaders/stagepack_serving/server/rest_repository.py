"""Triton's model repository extension over HTTP: the index of models, load and unload.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.parameters import refuse_load_parameters
from stagepack_serving.server.rest_request import read_fields


class IndexRequest(Struct, kw_only=True):
    """The body of a request for the index."""

    ready: bool = False


class LoadRequest(Struct, kw_only=True):
    """The body of a request to load a model."""

    parameters: dict[str, Any] = {}


class UnloadRequest(Struct, kw_only=True):
    """The body of a request to unload a model. Its parameter ``unload_dependents`` has no effect: there are no ensembles."""

    parameters: dict[str, Any] = {}


def repository_routes(control: ModelControl) -> list[Route]:
    """Build the routes of the extension."""

    async def index(request: Request) -> Response:
        fields = await read_fields(request, IndexRequest)
        return JSONResponse(await control.index(ready_only=fields.ready))

    async def load(request: Request) -> Response:
        fields = await read_fields(request, LoadRequest)
        refuse_load_parameters(fields.parameters)
        await control.load(request.path_params["model"])
        return JSONResponse({})

    async def unload(request: Request) -> Response:
        await read_fields(request, UnloadRequest)
        await control.unload(request.path_params["model"])
        return JSONResponse({})

    return [
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    ]
