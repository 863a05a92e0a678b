"""Routes of OpenAI's API: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``.

Source: https://platform.openai.com/docs/api-reference.

- Answers of OpenAI's API: completions, chat completions, and the events of both. Source: https://platform.openai.com/docs/api-reference.
"""

import asyncio
import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import RequestError, RequestStatus, refusal_fields
from stagepack_serving.server.generation.embedder import embedder_of, embedding_answer
from stagepack_serving.server.generation.generator import AnswerChannel, GenerationRequest, Generator, generator_of
from stagepack_serving.server.generation.openai_requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    OpenAIFields,
    decode_openai_request,
)
from stagepack_serving.server.parameters import shorten_deadline
from stagepack_serving.server.rest_inference import unless_disconnected
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.rest_request import decode_text_request
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.served_models import ServedModels

# The last event of a stream.
_DONE = "[DONE]"


class OpenAIAnswer(ABC):
    """The answer to one request, whole or in events."""

    def __init__(self, model_name: str, *, includes_usage: bool) -> None:
        self._includes_usage = includes_usage
        self._heading = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
        }

    @property
    @abstractmethod
    def id_prefix(self) -> str:
        """How the ids of such answers begin."""

    @abstractmethod
    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            text: the text.
            finish_reason: why it ends.
            usage: the numbers of tokens.

        Returns:
            The fields.
        """

    @abstractmethod
    def part(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return an event.

        Args:
            text: a part of the text.
            finish_reason: why the text ends with it; None if it goes on.

        Returns:
            The fields.
        """

    def usage_event(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the event after the last part of the text.

        Args:
            usage: the numbers of tokens.

        Returns:
            The fields.
        """
        return self.part("", None) | {"choices": [], "usage": usage}

    def _event(self, object_name: str, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        """An event with a choice."""
        usage = {"usage": None} if self._includes_usage else {}
        choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}]
        return {**self._heading, "object": object_name, "choices": choices} | usage


class CompletionAnswer(OpenAIAnswer):
    """A completion."""

    id_prefix = "cmpl"

    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """See `OpenAIAnswer`."""
        return self._event("text_completion", {"text": text}, finish_reason) | {"usage": usage}

    def part(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """See `OpenAIAnswer`."""
        return self._event("text_completion", {"text": text}, finish_reason)


class ChatAnswer(OpenAIAnswer):
    """A chat completion."""

    id_prefix = "chatcmpl"

    def __init__(self, model_name: str, *, includes_usage: bool) -> None:
        super().__init__(model_name, includes_usage=includes_usage)
        self._has_role = False

    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """See `OpenAIAnswer`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._event("chat.completion", {"message": message}, finish_reason) | {"usage": usage}

    def part(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """See `OpenAIAnswer`. The first event has the role of the message."""
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return self._event("chat.completion.chunk", {"delta": role | {"content": text}}, finish_reason)


def usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def openai_routes(models: ServedModels) -> list[BaseRoute]:
    """Return the routes."""

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_fields(model) for model in _text_models(models)]})

    async def show_model(request: Request) -> Response:
        model_name = request.path_params["model"]
        for model in _text_models(models):
            if model.name == model_name:
                return JSONResponse(_model_fields(model))
        raise RequestError(RequestStatus.NOT_FOUND, f"the model {model_name!r} does not exist")

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model}", show_model),
        Route("/v1/completions", TextRoute(models, CompletionFields, CompletionAnswer), methods=["POST"]),
        Route("/v1/chat/completions", TextRoute(models, ChatFields, ChatAnswer), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingRoute(models, EmbeddingFields), methods=["POST"]),
    ]


class OpenAIRoute(ABC):
    """An ASGI application whose errors have OpenAI's form."""

    def __init__(self, models: ServedModels, fields_type: type[OpenAIFields | EmbeddingFields]) -> None:
        self._models = models
        self._fields_type = fields_type

    @abstractmethod
    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        """Run the model on a request; return the answer, or None if it was sent as events."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Args:
            scope: the ASGI scope.
            receive: the ASGI channel of the request.
            send: the ASGI channel of the answer.

        Raises:
            RequestError: the request is refused, and no part of an answer was sent.
        """
        start_time, channel = time.monotonic(), AnswerChannel(scope, receive, send)
        deadline_seconds = self._models.limits.deadline
        try:
            fields = await self._read_fields(Request(scope, receive))
            async with self._models.request_scope(fields.model, "", "openai") as request_scope:
                shorten_deadline(request_scope.deadline, start_time + deadline_seconds - time.monotonic())
                with request_scope.reserve_place({}) as model:
                    answering = self._answer(model, fields, channel, request_scope.deadline)
                    answer = await unless_disconnected(answering, receive)
                    if answer is not None:
                        await request_scope.begin_answer()
                        await channel.send_json(answer)
        except RequestError as error:
            if channel.has_events:
                await channel.send_event(refusal_fields(scope["path"], str(error), error.status.http_code))
                await channel.end_events()
            elif not channel.is_started:
                raise

    async def _read_fields(self, request: Request) -> Any:
        """The fields of a request; one that is refused is counted here, since its model is not known."""
        limits = self._models.limits
        try:
            try:
                async with asyncio.timeout(limits.deadline):
                    decode = functools.partial(decode_openai_request, fields_type=self._fields_type)
                    return await decode_text_request(request, limits.max_request_bytes, decode)
            except TimeoutError:
                raise RequestError(RequestStatus.TOO_LATE, "the request was not complete before the deadline") from None
        except RequestError as error:
            self._models.metrics.count_answer("", "", "openai", error.status.name)
            raise


class TextRoute(OpenAIRoute):
    """Generates texts."""

    def __init__(
        self, models: ServedModels, fields_type: type[OpenAIFields], answer_type: Callable[..., OpenAIAnswer]
    ) -> None:
        super().__init__(models, fields_type)
        self._answer_type = answer_type

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        generator = generator_of(model)
        prompt = await _read_prompt(generator, fields)
        settings = (generator.chat_settings(prompt) if isinstance(fields, ChatFields) else {}) | fields.settings()
        request = GenerationRequest(prompt=prompt, settings=settings, stop_strings=fields.stop_strings())
        answer = self._answer_type(fields.model, includes_usage=fields.includes_usage)
        text, token_count, finish_reason = "", 0, ""
        async with aclosing(generator.generate(request)) as parts:
            async for part in parts:
                token_count += 1
                finish_reason = part.finish_reason or ""
                if not fields.stream:
                    text += part.text
                elif part.text or part.finish_reason or token_count == 1:
                    await channel.send_event(answer.part(part.text, part.finish_reason))
        usage = usage_counts(prompt.size, token_count)
        if not fields.stream:
            return answer.whole(text, finish_reason, usage)
        if fields.includes_usage:
            await channel.send_event(answer.usage_event(usage))
        await channel.send_event(_DONE)
        await channel.end_events()
        return None


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


class EmbeddingRoute(OpenAIRoute):
    """Embeds texts."""

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        sentences = await beside_loop(len(memoryview(fields.input)), fields.sentences)
        embeddings = await embedder_of(model).embed(sentences, fields, deadline)
        return await beside_loop(embeddings.vectors.nbytes, embedding_answer, fields, embeddings)


def _text_models(models: ServedModels) -> list[ServedModel]:
    """The models that generate or embed texts."""
    newest_by_name = {model.name: model for model in models.serving}
    return [
        model
        for model in newest_by_name.values()
        if model.embedder is not None or (model.generator is not None and model.generator.text_format is not None)
    ]


def _model_fields(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "stagepack"}
