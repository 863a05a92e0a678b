"""The Responses API of OpenAI, as chats: requests become `ChatFields`, and their answers and events become answers and events of this API.

Source: https://platform.openai.com/docs/api-reference/responses. The server keeps no answers: a request has the whole conversation.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from stagepack_serving.server.access_log import weight_fields
from stagepack_serving.server.errors import FieldError, RequestError
from stagepack_serving.server.rest_large_request import decode_field
from stagepack_text.openai.messages import Name, check_answered_call
from stagepack_text.openai.requests import IGNORED_FIELDS, ChatFields, JsonSchema, ResponseFormat, StreamOptions
from stagepack_text.server.sampling_fields import Probability, TokenCount
from stagepack_text.server.text_route import EventChannel
from stagepack_text.server.tool_calls import ChosenTool, FunctionName

# Fields of chats that errors name, and the fields of this API that they come from.
_FIELD_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
}


class _Part(Struct):
    """A part of a message, or of what a tool returned."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class _Item(Struct):
    """An item of the conversation: a message, a call of a tool, or what the tool returned."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[_Part] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _Format(Struct, omit_defaults=True):
    """What an answer is; the name and the description say nothing here, and `strict` is as if it was true."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | bool | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _TextFields(Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    """How much a model thinks, which changes no answer here, as in chats."""

    effort: str | None = None
    summary: None = None


class _Function(Struct):
    """A tool."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChosenFunction(Struct):
    type: Literal["function"]
    name: str


class ResponseFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request of the Responses API."""

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS - {
        "metadata",
        "reasoning_effort",
        "store",
        "verbosity",
    } | {"max_tool_calls"}
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),  # answers have no thoughts that could be left out
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str
    input: Raw
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    store: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    text: _TextFields = _TextFields()
    tool_choice: Literal["none", "auto", "required"] | _ChosenFunction = "auto"
    tools: list[_Function] = []
    top_p: Probability | None = None

    def check(self) -> None:
        """Check what the types of the fields do not say."""
        if self.previous_response_id is not None:
            message = "this server keeps no answers: send the conversation so far as `input`"
            raise FieldError("previous_response_id", message)
        if self.store:
            raise FieldError("store", "this server keeps no answers: expected false, found true")

    def chat_fields(self) -> ChatFields:
        """Return the fields of a chat with the same answer."""
        text_format, json_schema = self.text.format, None
        if text_format is not None:
            if (text_format.type == "json_schema") != (text_format.schema is not UNSET):
                expected = "expected a `schema` with the format json_schema, and only with it"
                raise FieldError("text", f"{expected}, found the format {text_format.type}")
            json_schema = None if text_format.schema is UNSET else JsonSchema(schema=text_format.schema)
        choice: Any = self.tool_choice
        if isinstance(choice, _ChosenFunction):
            choice = ChosenTool(type="function", function=FunctionName(choice.name))
        fields = ChatFields(
            model=self.model,
            messages=Raw(msgspec.json.encode(self._messages())),
            max_completion_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text_format is None else ResponseFormat(text_format.type, json_schema),
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True),
            temperature=self.temperature,
            tool_choice=choice if self.tools or choice != "auto" else None,
            tools=[_chat_tool(tool) for tool in self.tools],
            top_p=self.top_p,
        )
        fields.check()
        return fields

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation as messages of a chat."""
        items = decode_field("input", self.input, str | list[_Item])
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(items, str):
            return [*messages, {"role": "user", "content": items}]
        call_ids: set[str | None] = set()
        for index, item in enumerate(items):
            if item.type == "message":
                _require(item, index, "role", "content")
                messages.append({"role": item.role, "content": _chat_content(item.content)})
            elif item.type == "function_call_output":
                _require(item, index, "call_id", "output")
                check_answered_call("input", "call_id", str(item.call_id), call_ids, index)
                content = _chat_content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            else:
                _require(item, index, "call_id", "name", "arguments")
                call_ids.add(item.call_id)
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages


def _require(item: _Item, index: int, *field_names: str) -> None:
    for field_name in field_names:
        if getattr(item, field_name) is None:
            raise FieldError(
                "input", f"expected `{field_name}` in an item of the type {item.type}, found none - at `$[{index}]`"
            )


def _chat_content(content: str | list[_Part] | None) -> Any:
    return [{"type": "text", "text": part.text} for part in content] if isinstance(content, list) else content


def _chat_tool(tool: _Function) -> dict[str, Any]:
    facts = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in facts.items() if value is not None}}


@contextlib.contextmanager
def errors_of_response() -> Iterator[None]:
    """Name fields of this API in errors of a chat."""
    try:
        yield
    except RequestError as error:
        if error.field_name in _FIELD_NAMES:
            new_name = _FIELD_NAMES[error.field_name]
            error.args = (str(error).replace(f"{error.field_name}: ", f"{new_name}: ", 1),)
            error.field_name = new_name
        raise


class ResponseAnswer:
    """The answer to a request: whole, or as the object of its first and last events."""

    def __init__(self, fields: ResponseFields) -> None:
        self._fields = fields
        self._id, self._time = f"resp_{uuid.uuid4().hex}", int(time.time())

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer, made of the answer of a chat."""
        [choice] = chat["choices"]
        message, is_complete = choice["message"], choice["finish_reason"] != "length"
        calls = [_call_item(call) for call in message.get("tool_calls", ())]
        content = message["content"]
        items = [_message_item(content or "", is_complete=is_complete)] if content or not calls else []
        return self.object([*items, *calls], chat["usage"], is_complete=is_complete)

    def object(
        self, items: Sequence[Any], usage: Mapping[str, int] | None, *, is_complete: bool = True
    ) -> dict[str, Any]:
        """Return the answer; one without usage goes on."""
        fields, status = self._fields, "completed" if is_complete else "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._time,
            "status": "in_progress" if usage is None else status,
            "background": False,
            "error": None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": fields.model,
            "output": items,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": msgspec.to_builtins(fields.text.format or _Format("text"))},
            "tool_choice": msgspec.to_builtins(fields.tool_choice),
            "tools": msgspec.to_builtins(fields.tools),
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **weight_fields(),
        }


def _usage(chat_usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": chat_usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": chat_usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat_usage["total_tokens"],
    }


def _text_part(content: str) -> dict[str, Any]:
    return {"type": "output_text", "text": content, "annotations": [], "logprobs": []}


def _message_item(content: str, *, is_complete: bool) -> dict[str, Any]:
    status = "completed" if is_complete else "incomplete"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_text_part(content)],
    }


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    item_id = f"fc_{uuid.uuid4().hex}"
    return {"id": item_id, "type": "function_call", "status": "completed", "call_id": call["id"], **call["function"]}


class ResponseEvents:
    """Sends the events of a chat as events of this API."""

    def __init__(self, answer: ResponseAnswer, channel: EventChannel) -> None:
        self._answer = answer
        self._channel = channel
        self._event_count = 0
        self._item: dict[str, Any] | None = (
            None  # the message, which begins with the first character that is no whitespace
        )
        self._sent_text = ""
        self._waiting_text = ""
        self._calls: list[Any] = []
        self._is_complete = True
        self._usage: Mapping[str, int] = {}

    async def send_event(self, event: Any) -> None:
        """Send what an event of a chat says."""
        if isinstance(event, str):  # the end of the stream, which this API does not mark
            return
        if not self._event_count:
            for event_name in ("created", "in_progress"):
                await self._send(event_name, response=self._answer.object([], None))
        self._usage = event["usage"] or {}
        for choice in event["choices"]:
            self._is_complete = choice["finish_reason"] != "length"
            self._calls += choice["delta"].get("tool_calls", ())
            self._waiting_text += choice["delta"].get("content") or ""
            if self._item is not None or self._waiting_text.strip():
                await self._send_text()

    async def end_events(self) -> None:
        """Send the end of the items and of the answer."""
        items: list[dict[str, Any]] = []
        if self._item is not None or not self._calls:
            await self._send_text()
            items.append(await self._end_message())
        for call in self._calls:
            items.append(item := _call_item(call))
            call_position, arguments = {"item_id": item["id"], "output_index": len(items) - 1}, item["arguments"]
            begun = item | {"status": "in_progress", "arguments": ""}
            await self._send("output_item.added", output_index=len(items) - 1, item=begun)
            await self._send("function_call_arguments.delta", **call_position, delta=arguments)
            await self._send("function_call_arguments.done", **call_position, arguments=arguments)
            await self._send("output_item.done", output_index=len(items) - 1, item=item)
        event_name = "completed" if self._is_complete else "incomplete"
        await self._send(event_name, response=self._answer.object(items, self._usage, is_complete=self._is_complete))
        await self._channel.end_events()

    async def _send_text(self) -> None:
        if self._item is None:
            self._item = _message_item("", is_complete=True) | {"status": "in_progress", "content": []}
            await self._send("output_item.added", output_index=0, item=self._item)
            await self._send("content_part.added", **self._text_position(), part=_text_part(""))
        if self._waiting_text:
            await self._send("output_text.delta", **self._text_position(), delta=self._waiting_text, logprobs=[])
        self._sent_text, self._waiting_text = self._sent_text + self._waiting_text, ""

    async def _end_message(self) -> dict[str, Any]:
        assert self._item is not None
        item = _message_item(self._sent_text, is_complete=self._is_complete) | {"id": self._item["id"]}
        await self._send("output_text.done", **self._text_position(), text=self._sent_text, logprobs=[])
        await self._send("content_part.done", **self._text_position(), part=_text_part(self._sent_text))
        await self._send("output_item.done", output_index=0, item=item)
        return item

    def _text_position(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": 0, "content_index": 0}

    async def _send(self, event_name: str, **fields: Any) -> None:
        await self._channel.send_event(
            {"type": f"response.{event_name}", "sequence_number": self._event_count, **fields}
        )
        self._event_count += 1
