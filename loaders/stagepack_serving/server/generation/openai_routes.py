"""Routes of OpenAI's API: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``.

Source: https://platform.openai.com/docs/api-reference.
"""

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.embedder import embedder_of, embedding_answer
from stagepack_serving.server.generation.generator import GenerationRequest, Generator, generator_of
from stagepack_serving.server.generation.openai_requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    OpenAIFields,
    decode_openai_request,
)
from stagepack_serving.server.generation.text_route import AnswerChannel, TextRoute
from stagepack_serving.server.model_registry import ModelRegistry, RequestScope
from stagepack_serving.server.openapi import Endpoint
from stagepack_serving.server.parameters import shorten_deadline
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.rest_request import decode_text_request
from stagepack_serving.server.served_model import ServedModel

# The last event of a stream.
_DONE = "[DONE]"


class _TextAnswer:
    """The answer to a request for a completion or for a chat, whole or in events."""

    def __init__(self, fields: OpenAIFields) -> None:
        self._is_chat = isinstance(fields, ChatFields)
        self._includes_usage = fields.includes_usage
        self._has_role = False
        id_prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._heading = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": fields.model,
        }

    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""
        if self._is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return self._with_choice("chat.completion", {"message": message}, finish_reason) | {"usage": usage}
        return self._with_choice("text_completion", {"text": text}, finish_reason) | {"usage": usage}

    def part(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return an event with a part of the text. The first one of a chat has the role of the message."""
        if not self._is_chat:
            return self._with_choice("text_completion", {"text": text}, finish_reason)
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return self._with_choice("chat.completion.chunk", {"delta": role | {"content": text}}, finish_reason)

    def usage_event(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the event after the last part of the text."""
        return self.part("", None) | {"choices": [], "usage": usage}

    def _with_choice(self, object_name: str, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        usage = {"usage": None} if self._includes_usage else {}
        choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}]
        return {**self._heading, "object": object_name, "choices": choices} | usage


def openai_endpoints(models: ModelRegistry) -> list[Endpoint]:
    """Return the paths of the API."""

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_fields(model) for model in _text_models(models)]})

    async def show_model(request: Request) -> Response:
        model_name = request.path_params["model"]
        for model in _text_models(models):
            if model.name == model_name:
                return JSONResponse(_model_fields(model))
        raise RequestError(RequestStatus.NOT_FOUND, f"the model {model_name!r} does not exist")

    routes: list[tuple[str, str, type[OpenAIRoute], type[OpenAIFields | EmbeddingFields]]] = [
        ("completions", "The text after a prompt, whole or as server-sent events", CompletionRoute, CompletionFields),
        (
            "chat/completions",
            "The answer of a conversation, whole or as server-sent events",
            CompletionRoute,
            ChatFields,
        ),
        ("embeddings", "Embeddings of texts or tokens", EmbeddingRoute, EmbeddingFields),
    ]
    answer = dict[str, Any]
    return [
        Endpoint("/v1/models", "Models that write or embed texts", list_models, answer),
        Endpoint("/v1/models/{model}", "A model that writes or embeds texts", show_model, answer),
        *(
            Endpoint(f"/v1/{path}", f"{result}: OpenAI's API", route_type(models, fields_type), answer, fields_type)
            for path, result, route_type, fields_type in routes
        ),
    ]


class OpenAIRoute(TextRoute):
    """An ASGI application that reads requests of the API, which name their model in the body."""

    def __init__(self, models: ModelRegistry, fields_type: type[OpenAIFields | EmbeddingFields]) -> None:
        super().__init__(models)
        self._fields_type = fields_type

    @asynccontextmanager
    async def _begin(self, request: Request) -> AsyncIterator[tuple[RequestScope, Any]]:
        end_time = time.monotonic() + self._models.limits.deadline
        fields = await self._read_fields(request)
        async with self._models.request_scope(fields.model, "", "openai") as request_scope:
            shorten_deadline(request_scope.deadline, end_time - time.monotonic())
            yield request_scope, fields

    async def _read_fields(self, request: Request) -> Any:
        """The fields of a request; one that is refused is counted here, since its model is not known."""
        limits = self._models.limits
        decode = functools.partial(decode_openai_request, fields_type=self._fields_type)
        try:
            try:
                async with asyncio.timeout(limits.deadline):
                    return await decode_text_request(request, limits.max_request_bytes, decode)
            except TimeoutError:
                raise RequestError(RequestStatus.TOO_LATE, "the request was not complete before the deadline") from None
        except RequestError as error:
            self._models.metrics.count_answer("", "", "openai", error.status.name)
            raise


class CompletionRoute(OpenAIRoute):
    """Generates texts."""

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        generator = generator_of(model)
        prompt = await _read_prompt(generator, fields)
        settings = generator.openai_settings(prompt, fields.settings(), fields.default_count)
        request = GenerationRequest(prompt=prompt, settings=settings, stop_strings=fields.stop_strings())
        answer = _TextAnswer(fields)
        text, token_count, finish_reason = "", 0, ""
        async with aclosing(generator.generate(request)) as parts:
            async for part in parts:
                token_count += 1
                finish_reason = part.finish_reason or ""
                if not fields.stream:
                    text += part.text
                elif part.text or part.finish_reason or token_count == 1:
                    await channel.send_event(answer.part(part.text, part.finish_reason))
        usage = {"prompt_tokens": prompt.size, "completion_tokens": token_count}
        usage["total_tokens"] = sum(usage.values())
        if not fields.stream:
            return answer.whole(text, finish_reason, usage)
        if fields.includes_usage:
            await channel.send_event(answer.usage_event(usage))
        await channel.send_event(_DONE)
        await channel.end_events()
        return None


class EmbeddingRoute(OpenAIRoute):
    """Embeds texts."""

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        sentences = await beside_loop(len(memoryview(fields.input)), fields.sentences)
        embeddings = await embedder_of(model).embed(sentences, fields, deadline)
        return await beside_loop(embeddings.vectors.nbytes, embedding_answer, fields, embeddings)


async def _read_prompt(generator: Generator, fields: Any) -> Array:
    """The prompt of a request."""
    if isinstance(fields, ChatFields):
        if generator.text_format is None or generator.text_format.chat_template is None:
            message = f"{fields.model}: the bundle has no chat template: ask for a completion"
            raise RequestError(RequestStatus.BAD_REQUEST, message)
        messages = await beside_loop(len(memoryview(fields.messages)), fields.template_messages)
        text = await generator.text_format.chat_template.render(messages)
        return await generator.encode_text(text, adds_special_tokens=False)
    prompt = await beside_loop(len(memoryview(fields.prompt)), fields.single_prompt)
    return await generator.read_prompt(prompt)


def _text_models(models: ModelRegistry) -> list[ServedModel]:
    """The models that generate or embed texts."""
    newest_by_name = {model.name: model for model in models.serving}
    return [
        model
        for model in newest_by_name.values()
        if model.embedder is not None or (model.generator is not None and model.generator.text_format is not None)
    ]


def _model_fields(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "stagepack"}
