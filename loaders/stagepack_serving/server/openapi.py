"""The paths of the REST protocol, from which its routes, its OpenAPI document and the page of all paths are made.

Source: https://spec.openapis.org/oas/v3.1.0.
"""

import html
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.routing import Route

from stagepack_serving.server.openapi_schemas import Refusal
from stagepack_serving.server.security import PATHS_WITHOUT_TOKEN

# The statuses of a request that runs a model, other than 200.
INFERENCE_REFUSALS: Final = (400, 404, 413, 500, 503, 504)
# The paths of a model and of one of its versions.
MODEL_PATHS: Final = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path.

    Attributes:
        path: the path, with the names of its parameters in braces.
        summary: what it does.
        handler: what answers: a handler of Starlette, or an ASGI application.
        answer: the type of the answer, or a media type; None if the answer is empty.
        request: the type of the body of a POST; None for a GET.
        refusals: the statuses other than 200, with an error as the answer.
    """

    path: str
    summary: str
    handler: Any
    answer: Any = None
    request: Any = None
    refusals: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        """The method of HTTP."""
        return "GET" if self.request is None else "POST"

    def route(self) -> Route:
        """Return its route."""
        return Route(self.path, self.handler, methods=[self.method])


def endpoints_page(endpoints: Sequence[Endpoint]) -> str:
    """Return a page of all paths, without scripts, which requests nothing from the network."""
    rows = "".join(
        f"<tr><td>{endpoint.method}</td><td><code>{html.escape(endpoint.path)}</code></td><td>{html.escape(endpoint.summary)}</td></tr>"
        for endpoint in endpoints
    )
    return (
        "<!doctype html><meta charset='utf-8'><title>stagepack server</title><h1>stagepack server</h1>"
        "<p>The fields of requests and answers: <a href='/openapi.json'>/openapi.json</a>.</p>"
        f"<table>{rows}</table>"
    )


def openapi_document(endpoints: Sequence[Endpoint], *, requires_token: bool) -> dict[str, Any]:
    """Build the OpenAPI document of the server."""
    types = {Refusal, *(part for endpoint in endpoints for part in (endpoint.request, endpoint.answer))}
    described_types = [part for part in types if part is not None and not isinstance(part, str)]
    schemas, components = msgspec.json.schema_components(described_types, ref_template="#/components/schemas/{name}")
    schema_of_type = dict(zip(described_types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        fields = _operation_fields(endpoint, schema_of_type)
        paths.setdefault(endpoint.path, _parameters(endpoint.path))[endpoint.method.lower()] = fields
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "stagepack serve",
            "description": "The Open Inference Protocol, with extensions of Triton",
            "version": importlib.metadata.version("stagepack"),
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if requires_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in PATHS_WITHOUT_TOKEN:
            paths[path]["get"]["security"] = []
    return document


def _parameters(path: str) -> dict[str, Any]:
    """The parameters of a path, in the fields of its entry."""
    names = [name for name in ("model", "version") if f"{{{name}}}" in path]
    fields = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {"parameters": fields} if fields else {}


def _operation_fields(endpoint: Endpoint, schema_of_type: Mapping[Any, Any]) -> dict[str, Any]:
    def content(part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": {part: {"schema": {"type": "string"}}}}
        return {"content": {"application/json": {"schema": schema_of_type[part]}}}

    responses = {"200": {"description": "OK"} | ({} if endpoint.answer is None else content(endpoint.answer))}
    for status in endpoint.refusals:
        responses[str(status)] = {"description": "Refused"} | content(Refusal)
    if endpoint.answer is None:
        responses["503"] = {"description": "Not ready"}
    fields = {"summary": endpoint.summary, "responses": responses}
    return fields if endpoint.request is None else fields | {"requestBody": content(endpoint.request)}
