"""Routes of OpenAI's API: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/v1/responses`` and ``/v1/embeddings``.

Source: https://platform.openai.com/docs/api-reference.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import BadRequestError, FieldError, RequestError, RequestStatus, errors_of_field
from stagepack_serving.server.model_registry import ModelRegistry, RequestScope
from stagepack_serving.server.openapi import Endpoint
from stagepack_serving.server.parameters import shorten_deadline
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.rest_request import decode_text_request
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.openai.answers import ScoredToken, TextAnswer, TextChoice
from stagepack_text.openai.embedder import Embedder, embedder_of, embedding_answer
from stagepack_text.openai.requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    OpenAIFields,
    RequestFields,
    decode_openai_request,
)
from stagepack_text.openai.responses import (
    ResponseAnswer,
    ResponseEvents,
    ResponseFields,
    errors_of_response,
)
from stagepack_text.server.generator import IDS_INPUT, Generator
from stagepack_text.server.generators import Generators, generator_of
from stagepack_text.server.json_grammar import JsonGrammar
from stagepack_text.server.served_text import GenerationRequest
from stagepack_text.server.text_route import AnswerChannel, EventChannel, TextRoute
from stagepack_text.server.tool_calls import CallReader

# The last event of a stream.
_DONE = "[DONE]"


def openai_endpoints(models: ModelRegistry) -> list[Endpoint]:
    """Return the paths of the API."""

    async def list_models(_: Request) -> Response:
        fields_by_id: dict[str, dict[str, Any]] = {}
        for fields in itertools.chain.from_iterable(map(_model_fields, _text_models(models))):
            fields_by_id.setdefault(fields["id"], fields)  # the first model of an adapter answers requests that name it
        return JSONResponse({"object": "list", "data": list(fields_by_id.values())})

    async def show_model(request: Request) -> Response:
        model_name = request.path_params["model"]
        for model in _text_models(models):
            for fields in _model_fields(model):
                if fields["id"] == model_name:
                    return JSONResponse(fields)
        refusal = RequestError(RequestStatus.NOT_FOUND, f"the model {model_name!r} does not exist")
        refusal.field_name = "model"
        raise refusal

    routes: list[tuple[str, str, type[OpenAIRoute], type[RequestFields]]] = [
        ("completions", "The text after a prompt, whole or as server-sent events", CompletionRoute, CompletionFields),
        (
            "chat/completions",
            "The answer of a conversation, whole or as server-sent events",
            CompletionRoute,
            ChatFields,
        ),
        (
            "responses",
            "The next items of a conversation, whole or as server-sent events",
            ResponsesRoute,
            ResponseFields,
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

    def __init__(self, models: ModelRegistry, fields_type: type[RequestFields]) -> None:
        super().__init__(models)
        self._fields_type = fields_type

    @asynccontextmanager
    async def _begin(self, request: Request) -> AsyncIterator[tuple[RequestScope, Any]]:
        end_time = time.monotonic() + self._models.limits.deadline
        await self._models.check_head("openai", self._models.limits.deadline)
        fields = await self._read_fields(request)
        try:
            model_name = _served_name(self._models, fields.model)
            async with self._models.request_scope(model_name, "", "openai") as request_scope:
                shorten_deadline(request_scope.deadline, end_time - time.monotonic())
                yield request_scope, fields
        except RequestError as error:
            if error.status is RequestStatus.NOT_FOUND:
                error.field_name = "model"
            raise

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


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: its tokens, or what else the model reads, and its text where it is one."""

    array: Array
    text: str | None = None


class CompletionRoute(OpenAIRoute):
    """Generates texts."""

    async def _answer(self, model: ServedModel, fields: Any, channel: EventChannel, deadline: asyncio.Timeout) -> Any:
        with errors_of_field("model"):
            generator = generator_of(model)
        reader = _call_reader(generator, fields) if isinstance(fields, ChatFields) else None
        grammar = await _answer_grammar(generator, fields, reader) if isinstance(fields, ChatFields) else None
        with errors_of_field("messages" if isinstance(fields, ChatFields) else "prompt"):
            prompts = await _read_prompts(generator, fields)
            requests = [
                request
                for prompt in prompts
                for request in _generation_requests(generator, fields, prompt, grammar, reader)
            ]
            answer = TextAnswer(fields, generator.text_format, reader)
            choices = [TextChoice(answer, index) for index in range(len(requests))]
            if isinstance(fields, CompletionFields) and fields.echo:
                await _echo(generator, fields, prompts, choices)
            if fields.max_tokens == 0:
                for event in itertools.chain.from_iterable(choice.finish("length") for choice in choices):
                    await channel.send_event(event)
            else:
                async with aclosing(generator.generate(requests)) as parts:
                    async for part in parts:
                        for event in choices[part.index].add(part):
                            await channel.send_event(event)
        usage = _usage(prompts, choices)
        if not fields.stream:
            return answer.whole(choices, usage)
        if fields.includes_usage:
            await channel.send_event(answer.event([], usage))
        await channel.send_event(_DONE)
        await channel.end_events()
        return None


def _usage(prompts: Sequence[_Prompt], choices: Sequence[TextChoice]) -> dict[str, int]:
    read, written = sum(prompt.array.size for prompt in prompts), sum(choice.token_count for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _generation_requests(
    generator: Generator,
    fields: OpenAIFields,
    prompt: _Prompt,
    grammar: JsonGrammar | None,
    reader: CallReader | None,
) -> Iterator[GenerationRequest]:
    """The texts after a prompt. With a seed, each is that of a request for one text with the next seed."""
    given_settings = fields.settings() | ({"max_new_tokens": 1} if fields.max_tokens == 0 else {})
    settings = generator.openai_settings(prompt.array, given_settings, fields.default_count)
    shown_tokens: frozenset[int] = frozenset()
    if reader is not None and generator.text_format is not None:
        shown_tokens = generator.text_format.special_ids(reader.form.markers)
    for number in range(fields.n):
        seed = {} if fields.seed is None else {"seed": fields.seed + number}
        yield GenerationRequest(
            prompt=prompt.array,
            settings=settings | seed | ({} if grammar is None else {"logits_processor": grammar.start_text()}),
            stop_strings=fields.stop_strings(),
            logprob_count=fields.logprob_count,
            shown_tokens=shown_tokens,
            adapter=generator.adapter_of(fields.model),
        )


def _call_reader(generator: Generator, fields: ChatFields) -> CallReader | None:
    """What finds the calls of tools in an answer; None if it has none."""
    tools = fields.callable_tools()
    if not tools:
        return None
    text_format = generator.text_format
    form = text_format.chat_template.call_form if text_format is not None and text_format.chat_template else None
    if form is None:
        expected = (
            "a chat template with tools, whose calls have the form of Hermes and Qwen (<tool_call>), Mistral or Llama 3"
        )
        raise FieldError("tools", f"the bundle of {fields.model} cannot call them: expected {expected}")
    names = frozenset(tool.function.name for tool in tools)
    return CallReader(form, names, None if fields.parallel_tool_calls else 1)


async def _answer_grammar(generator: Generator, fields: ChatFields, reader: CallReader | None) -> JsonGrammar | None:
    """What rules out tokens that an answer must not have; None if it may have all."""
    schema, frame, field_name = fields.schema(), ("", ""), "response_format"
    if reader is not None and fields.must_call:
        schema, frame, field_name = reader.form.schema(fields.callable_tools()), reader.form.frame(), "tools"
    if schema is None:
        return None
    with errors_of_field(field_name):
        return await asyncio.to_thread(generator.compile_schema, schema, frame)


async def _echo(
    generator: Generator, fields: CompletionFields, prompts: Sequence[_Prompt], choices: Sequence[TextChoice]
) -> None:
    """Begin the choices with their prompts."""
    if generator.text_format is None or not generator.continues_prompt:
        message = f"expected a model that continues texts: {fields.model} has an encoder, or no tokenizer"
        raise FieldError("echo", message)
    for number, prompt in enumerate(prompts):
        tokens = prompt.array[0].tolist()
        text = generator.text_format.decode(tokens) if prompt.text is None else prompt.text
        scored_tokens = []
        if fields.logprob_count is not None:
            scored_tokens.append(ScoredToken(tokens[0], None))
            if len(tokens) > 1:
                adapter = generator.adapter_of(fields.model)
                scoring = generator.prompt_scoring(prompt.array, fields.logprob_count, adapter)
                async with aclosing(generator.generate([scoring])) as parts:
                    scored_tokens += [ScoredToken(part.token, part.logprobs) async for part in parts]
        for choice in choices[number * fields.n : (number + 1) * fields.n]:
            choice.echo(text, scored_tokens)


class ResponsesRoute(CompletionRoute):
    """Generates texts as chats do."""

    async def _answer(self, model: ServedModel, fields: Any, channel: EventChannel, deadline: asyncio.Timeout) -> Any:
        response = ResponseAnswer(fields)
        with errors_of_response():
            chat_fields = await beside_loop(len(memoryview(fields.input)), fields.chat_fields)
            chat = await super()._answer(model, chat_fields, ResponseEvents(response, channel), deadline)
        return None if chat is None else response.whole(chat)

    def _error_event(self, path: str, error: RequestError, event_count: int) -> dict[str, Any]:
        facts = super()._error_event(path, error, event_count)["error"]
        return {**facts, "type": "error", "code": facts["code"] or facts["type"], "sequence_number": event_count}


class EmbeddingRoute(OpenAIRoute):
    """Embeds texts."""

    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        sentences = await beside_loop(len(memoryview(fields.input)), fields.sentences)
        with errors_of_field("model"):
            embedder = embedder_of(model)
        embeddings = await embedder.embed(sentences, fields, deadline)
        return await beside_loop(embeddings.vectors.nbytes, embedding_answer, fields, embeddings)


async def _read_prompts(generator: Generator, fields: Any) -> list[_Prompt]:
    """The prompts of a request."""
    if isinstance(fields, ChatFields):
        if generator.text_format is None or generator.text_format.chat_template is None:
            raise BadRequestError(f"{fields.model}: the bundle has no chat template: ask for a completion")
        messages = await beside_loop(len(memoryview(fields.messages)), fields.template_messages)
        tools = fields.tools if fields.callable_tools() else ()
        text = await generator.text_format.chat_template.render(messages, tools)
        return [_Prompt(await generator.encode_text(text, adds_special_tokens=False), text)]
    prompts = await beside_loop(
        len(memoryview(fields.prompt)), fields.prompts, has_tokens=generator.prompt_name == IDS_INPUT
    )
    return [
        _Prompt(await generator.read_prompt(prompt), prompt if isinstance(prompt, str) else None) for prompt in prompts
    ]


def _text_models(models: ModelRegistry) -> list[ServedModel]:
    """The models that generate or embed texts."""
    newest_by_name = {model.name: model for model in models.serving}
    return [model for model in newest_by_name.values() if _reads_texts(model)]


def _reads_texts(model: ServedModel) -> bool:
    generators = model.part(Generators)
    return model.part(Embedder) is not None or (
        generators is not None and generators.of(model.weights).text_format is not None
    )


def _served_name(models: ModelRegistry, model_name: str) -> str:
    """The model that a request names: itself, or by one of its adapters."""
    if any(model.name == model_name for model in models.serving):
        return model_name
    return next((model.name for model in _text_models(models) if model_name in model.adapters.names), model_name)


def _model_fields(model: ServedModel) -> list[dict[str, Any]]:
    """The fields of a model, and of its adapters, which are models of their own here."""
    own = {"id": model.name, "object": "model", "created": 0, "owned_by": "stagepack"}
    return [own, *({**own, "id": adapter, "parent": model.name} for adapter in model.adapters.names)]
