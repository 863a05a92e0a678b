"""Triton's generate extension: ``/generate`` answers with a whole text, ``/generate_stream`` with an event for each part of it.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw
from starlette.requests import Request

from stagepack_serving.server.access_log import weight_fields
from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.model_registry import ModelRegistry, RequestScope
from stagepack_serving.server.openapi import INFERENCE_REFUSALS, MODEL_PATHS, Endpoint
from stagepack_serving.server.parameters import check_request_id, named_adapter, shorten_deadline, timeout_parameter
from stagepack_serving.server.rest_large_request import decode_field, decode_fields, split_fields
from stagepack_serving.server.rest_request import decode_text_request, requested_model
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.server.generate_request import TEXT_INPUT, read_request
from stagepack_text.server.generator import Generator
from stagepack_text.server.generators import generator_of
from stagepack_text.server.text_route import AnswerChannel, TextRoute

# The inputs of models that hold prompts.
_PROMPT_PREFIX: Final = "input_"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The fields of a request: its prompts by name (see `read_request`), its parameters and its id, which may be empty."""

    prompts: dict[str, str | Raw]
    parameters: dict[str, Any]
    request_id: str


class GenerateRoute(TextRoute):
    """An ASGI application that answers requests of the extension."""

    def __init__(self, models: ModelRegistry, *, streams: bool) -> None:
        super().__init__(models)
        self._streams = streams

    @asynccontextmanager
    async def _begin(self, request: Request) -> AsyncIterator[tuple[RequestScope, _Fields]]:
        async with self._models.request_scope(*requested_model(request), "rest") as request_scope:
            request_scope.check_admission()
            fields = await decode_text_request(request, self._models.limits.max_request_bytes, _decode_fields)
            fields.parameters.update(named_adapter(fields.parameters, request_scope.adapter))
            yield request_scope, fields

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        generator = generator_of(model)
        shorten_deadline(deadline, timeout_parameter(fields.parameters))
        request, _ = await read_request(generator, fields.prompts, fields.parameters)
        heading = {"model_name": model.name, "model_version": model.version} | (
            {"id": fields.request_id} if fields.request_id else {}
        )
        text, finish_reason = "", None
        tokens: list[int] = []
        async with aclosing(generator.generate([request])) as parts:
            async for part in parts:
                if self._streams:
                    text, tokens = "", []
                text += part.text
                tokens.append(part.token)
                finish_reason = part.finish_reason
                if self._streams:
                    await channel.send_event(
                        heading | weight_fields() | _outputs(generator, text, tokens, finish_reason)
                    )
        if not self._streams:
            return heading | weight_fields() | _outputs(generator, text, tokens, finish_reason)
        await channel.end_events()
        return None


def generate_endpoints(models: ModelRegistry) -> list[Endpoint]:
    """Return the paths of the extension."""
    text, refused = dict[str, Any], INFERENCE_REFUSALS
    whole_text, text_events = GenerateRoute(models, streams=False), GenerateRoute(models, streams=True)
    summary, stream_summary = (
        "The text after a prompt: Triton's generate extension",
        "The text after a prompt, as server-sent events",
    )
    return [
        endpoint
        for path in MODEL_PATHS
        for endpoint in (
            Endpoint(f"{path}/generate", summary, whole_text, text, text, refused),
            Endpoint(f"{path}/generate_stream", stream_summary, text_events, "text/event-stream", text, refused),
        )
    ]


def _decode_fields(body: bytearray) -> _Fields:
    """Decode the body of a request."""
    fields = split_fields(body)
    prompts: dict[str, str | Raw] = {
        field_name: fields.pop(field_name) for field_name in list(fields) if field_name.startswith(_PROMPT_PREFIX)
    }
    if TEXT_INPUT in fields:
        prompts[TEXT_INPUT] = decode_field(TEXT_INPUT, fields.pop(TEXT_INPUT), str)
    parameters = decode_fields(fields)
    request_id = check_request_id(parameters.pop("id", ""))
    more_parameters = parameters.pop("parameters", {})
    if not isinstance(more_parameters, dict):
        found = type(more_parameters).__name__
        raise BadRequestError(f"parameters: expected an object, found {found}")
    # Fields of the request beside the prompt are parameters too.
    return _Fields(prompts=prompts, parameters=parameters | more_parameters, request_id=request_id)


def _outputs(generator: Generator, text: str, tokens: list[int], finish_reason: str | None) -> dict[str, Any]:
    """The fields of an answer, or of a part of it."""
    text_output = {"text_output": text} if generator.text_format is not None else {}
    reason = {} if finish_reason is None else {"finish_reason": finish_reason}
    return text_output | {"output_ids": tokens} | reason
