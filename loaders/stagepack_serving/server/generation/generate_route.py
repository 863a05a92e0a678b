"""Triton's generate extension: ``/generate`` answers with a whole text, ``/generate_stream`` with an event for each part of it.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md.
"""

import asyncio
import json
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from stagepack_loaders.elements import Array
from stagepack_serving.server.deadlines import shorten_deadline
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.answer_channel import AnswerChannel
from stagepack_serving.server.generation.generator import Generator, generator_of
from stagepack_serving.server.generation.prompts import TEXT_INPUT, read_request
from stagepack_serving.server.parameters import check_request_id, timeout_parameter
from stagepack_serving.server.rest_body import decode_text_request
from stagepack_serving.server.rest_inference import requested_model, unless_disconnected
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.served_models import ServedModels


class GenerateRoute:
    """An ASGI application that answers requests of the extension."""

    def __init__(self, models: ServedModels, *, streams: bool) -> None:
        """Create the route.

        Args:
            models: the models to serve.
            streams: send each part of a text when it is generated.
        """
        self._models = models
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Args:
            scope: the ASGI scope.
            receive: the ASGI channel of the request.
            send: the ASGI channel of the answer.

        Raises:
            RequestError: the request is refused, and no part of an answer was sent.
        """
        request, channel = Request(scope, receive), AnswerChannel(scope, receive, send)
        try:
            async with self._models.request_scope(*requested_model(request), "rest") as request_scope:
                fields = await decode_text_request(request, self._models.limits.max_request_bytes, _decode_fields)
                with request_scope.reserve_place({}) as model:
                    answer = self._answer(model, fields, request_scope.deadline, channel)
                    await unless_disconnected(answer, receive)
        except RequestError as error:
            if not channel.is_started:
                raise
            if channel.has_events:
                await channel.send_event({"error": str(error)})
                await channel.end_events()

    async def _answer(
        self, model: ServedModel, fields: dict[str, Any], deadline: asyncio.Timeout, channel: AnswerChannel
    ) -> None:
        generator = generator_of(model)
        prompts = _take_prompts(fields, generator)
        parameters = fields.pop("parameters", {})
        if not isinstance(parameters, dict):
            raise RequestError(RequestStatus.BAD_REQUEST, f"parameters: expected an object, found {parameters!r}")
        request_id = check_request_id(fields.pop("id", ""))
        # Fields of the request beside the prompt are parameters too.
        parameters = fields | parameters
        shorten_deadline(deadline, timeout_parameter(parameters))
        request, _ = await read_request(generator, prompts, parameters)
        heading = {"model_name": model.name, "model_version": model.version} | (
            {"id": request_id} if request_id else {}
        )
        text, finish_reason = "", None
        tokens: list[int] = []
        async with aclosing(generator.generate(request)) as parts:
            async for part in parts:
                if self._streams:
                    text, tokens = "", []
                text += part.text
                tokens.append(part.token)
                finish_reason = part.finish_reason
                if self._streams:
                    await channel.send_event(heading | _outputs(generator, text, tokens, finish_reason))
        if self._streams:
            await channel.end_events()
        else:
            await channel.send_json(heading | _outputs(generator, text, tokens, finish_reason))


def _decode_fields(body: bytearray) -> dict[str, Any]:
    """The fields of a request. Python's parser, since a prompt of numbers may hold NaN."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the request is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(RequestStatus.BAD_REQUEST, "the request: expected a JSON object")
    return fields


def _take_prompts(fields: dict[str, Any], generator: Generator) -> dict[str, str | Array]:
    """Remove the prompts from the fields of a request."""
    prompts: dict[str, str | Array] = {}
    if TEXT_INPUT in fields:
        text = fields.pop(TEXT_INPUT)
        if not isinstance(text, str):
            raise RequestError(
                RequestStatus.BAD_REQUEST, f"{TEXT_INPUT}: expected a string, found {type(text).__name__}"
            )
        prompts[TEXT_INPUT] = text
    if generator.prompt_name in fields:
        prompts[generator.prompt_name] = generator.prompt_array(fields.pop(generator.prompt_name))
    return prompts


def _outputs(generator: Generator, text: str, tokens: list[int], finish_reason: str | None) -> dict[str, Any]:
    """The fields of an answer, or of a part of it."""
    text_output = {"text_output": text} if generator.text_format is not None else {}
    reason = {} if finish_reason is None else {"finish_reason": finish_reason}
    return text_output | {"output_ids": tokens} | reason
