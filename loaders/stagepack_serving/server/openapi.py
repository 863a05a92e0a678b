"""The OpenAPI document of the REST protocol: https://spec.openapis.org/oas/v3.1.0."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from stagepack_serving.server import openapi_schemas as answers
from stagepack_serving.server.generation.openai_requests import ChatFields, CompletionFields, EmbeddingFields
from stagepack_serving.server.rest_repository import IndexRequest, LoadRequest, UnloadRequest
from stagepack_serving.server.rest_request import RequestHeader
from stagepack_serving.server.security import PATHS_WITHOUT_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path.

    Attributes:
        summary: what it does.
        method: the method of HTTP.
        request: the type of the body; None if there is none.
        answer: the type of the answer, or a media type; None if the answer is empty.
        refusals: the statuses other than 200, with an error as the answer.
    """

    summary: str
    method: str = "get"
    request: Any = None
    answer: Any = None
    refusals: tuple[int, ...] = ()


_INFERENCE_REFUSALS: Final = (400, 404, 413, 500, 503, 504)
_MODEL_OPERATIONS: Final = {
    "": Operation(summary="Names, types and shapes of a model", answer=answers.ModelMetadata, refusals=(404,)),
    "/ready": Operation(summary="Whether a model takes requests", refusals=(404,)),
    "/config": Operation(summary="Configuration as Triton writes it", answer=dict[str, Any], refusals=(404,)),
    "/stats": Operation(summary="What versions of a model have done", answer=answers.StatisticsAnswer, refusals=(404,)),
    "/infer": Operation(
        summary="Run a model. Tensors may follow the JSON as bytes: the binary tensor extension",
        method="post",
        request=RequestHeader,
        answer=answers.InferenceAnswer,
        refusals=_INFERENCE_REFUSALS,
    ),
    "/generate": Operation(
        summary="The text after a prompt: Triton's generate extension",
        method="post",
        request=dict[str, Any],
        answer=dict[str, Any],
        refusals=_INFERENCE_REFUSALS,
    ),
    "/generate_stream": Operation(
        summary="The text after a prompt, as server-sent events",
        method="post",
        request=dict[str, Any],
        answer="text/event-stream",
        refusals=_INFERENCE_REFUSALS,
    ),
}
_OPENAI_OPERATIONS: Final = {
    "/v1/models": [Operation(summary="Models that write or embed texts", answer=dict[str, Any])],
    "/v1/models/{model}": [Operation(summary="A model that writes or embeds texts", answer=dict[str, Any])],
    **{
        f"/v1/{path}": [
            Operation(summary=f"{result}: OpenAI's API", method="post", request=fields_type, answer=dict[str, Any])
        ]
        for path, result, fields_type in (
            ("completions", "The text after a prompt, whole or as server-sent events", CompletionFields),
            ("chat/completions", "The answer of a conversation, whole or as server-sent events", ChatFields),
            ("embeddings", "Embeddings of texts or tokens", EmbeddingFields),
        )
    },
}
# The operations by path. Those of a model exist for each of its versions too.
OPERATIONS: Final[Mapping[str, list[Operation]]] = {
    "/": [Operation(summary="Where the protocols of the server are", answer=dict[str, str])],
    "/docs": [Operation(summary="A page of all paths", answer="text/html")],
    "/v2": [Operation(summary="Name, version and extensions of the server", answer=answers.ServerMetadata)],
    "/v2/health/live": [Operation(summary="Whether the process runs")],
    "/v2/health/ready": [Operation(summary="Whether the server takes requests")],
    "/v2/models/stats": [Operation(summary="What all models have done", answer=answers.StatisticsAnswer)],
    **{
        f"/v2/models/{{model}}{versions}{suffix}": [operation]
        for versions in ("", "/versions/{version}")
        for suffix, operation in _MODEL_OPERATIONS.items()
    },
    "/v2/repository/index": [
        Operation(
            summary="Models, versions and their states",
            method="post",
            request=IndexRequest,
            answer=list[answers.IndexEntry],
            refusals=(400, 500),
        )
    ],
    "/v2/repository/models/{model}/load": [
        Operation(
            summary="Load the newest version of a model",
            method="post",
            request=LoadRequest,
            answer=dict[str, Any],
            refusals=(400, 403, 404, 500),
        )
    ],
    "/v2/repository/models/{model}/unload": [
        Operation(
            summary="Unload a model",
            method="post",
            request=UnloadRequest,
            answer=dict[str, Any],
            refusals=(400, 403, 404),
        )
    ],
    "/v2/logging": [
        Operation(summary="Which levels are logged", answer=answers.LogSettings),
        Operation(
            summary="Change which levels are logged",
            method="post",
            request=dict[str, Any],
            answer=answers.LogSettings,
            refusals=(400,),
        ),
    ],
    **_OPENAI_OPERATIONS,
    "/metrics": [Operation(summary="Metrics for Prometheus", answer="text/plain")],
    "/openapi.json": [Operation(summary="This document", answer=dict[str, Any])],
}


def openapi_document(*, requires_token: bool = False) -> dict[str, Any]:
    """Build the OpenAPI document of the server."""
    types = {answers.Refusal, Any}
    for operations in OPERATIONS.values():
        types |= {part for operation in operations for part in (operation.request, operation.answer)}
    named_types = [part for part in types if part is not None and not isinstance(part, str)]
    schemas, components = msgspec.json.schema_components(named_types, ref_template="#/components/schemas/{name}")
    schema_of_type = dict(zip(named_types, schemas, strict=True))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "stagepack serve",
            "description": "The Open Inference Protocol, with extensions of Triton",
            "version": importlib.metadata.version("stagepack"),
        },
        "paths": {
            path: _parameters(path)
            | {operation.method: _operation_fields(operation, schema_of_type) for operation in operations}
            for path, operations in OPERATIONS.items()
        },
        "components": {"schemas": components},
    }
    if requires_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in PATHS_WITHOUT_TOKEN:
            document["paths"][path]["get"]["security"] = []
    return document


def _parameters(path: str) -> dict[str, Any]:
    """The parameters of a path, in the fields of its entry."""
    names = [name for name in ("model", "version") if f"{{{name}}}" in path]
    fields = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {"parameters": fields} if fields else {}


def _operation_fields(operation: Operation, schema_of_type: Mapping[Any, Any]) -> dict[str, Any]:
    def content(part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": {part: {"schema": {"type": "string"}}}}
        return {"content": {"application/json": {"schema": schema_of_type[part]}}}

    responses = {"200": {"description": "OK"} | ({} if operation.answer is None else content(operation.answer))}
    for status in operation.refusals:
        responses[str(status)] = {"description": "Refused"} | content(answers.Refusal)
    if operation.answer is None:
        responses["503"] = {"description": "Not ready"}
    fields = {"summary": operation.summary, "responses": responses}
    return fields if operation.request is None else fields | {"requestBody": content(operation.request)}
