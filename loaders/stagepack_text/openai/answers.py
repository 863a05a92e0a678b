"""The answers of OpenAI's API to requests for texts: whole ones, and the events of streams.

Source: https://platform.openai.com/docs/api-reference.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stagepack_serving.server.access_log import weight_fields
from stagepack_text.openai.requests import ChatFields, OpenAIFields
from stagepack_text.openai.token_starts import TokenStarts
from stagepack_text.sampling import TokenLogprobs
from stagepack_text.server.served_text import GeneratedPart
from stagepack_text.server.text_stream import TextFormat
from stagepack_text.server.tool_calls import CallReader, ToolCall

_LEAST_LOGPROB: Final = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, and how likely it was; None for the first one of a prompt."""

    token: int
    logprobs: TokenLogprobs | None


class TextChoice:
    """One of the texts of an answer, which grows by the parts that tokens add.

    Attributes:
        text: the text so far: an echo of the prompt, and what was generated.
        token_count: how many tokens were generated.
        finish_reason: why the text ends; None while it goes on.
        weight_version: the name of the version of the weights that it was generated with; None without a token.
    """

    def __init__(self, answer: "TextAnswer", index: int) -> None:
        self._answer = answer
        self._index = index
        self._tokens: list[ScoredToken] = []
        self._starts = TokenStarts(answer.text_format)
        self._event_start = (0, 0)  # in the text and in the tokens
        self._has_role = False
        self.text = ""
        self.token_count = 0
        self.finish_reason: str | None = None
        self.weight_version: str | None = None

    def echo(self, text: str, tokens: Iterable[ScoredToken]) -> None:
        """Begin the text with the prompt."""
        self.text += text
        for scored in tokens:
            self._tokens.append(scored)
            self._starts.add(scored.token)
        self._starts.begin_text(len(self.text))

    def add(self, part: GeneratedPart) -> list[dict[str, Any]]:
        """Add what a token adds; return the events that a stream has of it."""
        self.token_count += 1
        self.text += part.text
        self.finish_reason = part.finish_reason
        self.weight_version = None if part.weights is None else part.weights.name
        text_format = self._answer.text_format
        ends_text = part.finish_reason == "stop" and text_format is not None and text_format.is_special(part.token)
        if part.logprobs is not None and not ends_text:
            self._tokens.append(ScoredToken(part.token, part.logprobs))
            if not self._answer.is_chat:
                self._starts.add(part.token)
        return self._events()

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """End the text without a token; return the events that a stream has of it."""
        self.finish_reason = reason
        return self._events()

    def whole(self) -> dict[str, Any]:
        """Return the fields of the choice in the whole answer."""
        if not self._answer.is_chat:
            return self._fields({"text": self.text}, slice(None))
        content, calls = self._content()
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {
                "content": content if content.strip() else None,
                "tool_calls": [call.fields() for call in calls],
            }
        return self._fields({"message": message}, slice(None), calls_tools=bool(calls))

    def _events(self) -> list[dict[str, Any]]:
        """The events of what was added since the last one. The first one of a chat has the role of the message."""
        if not self._answer.is_stream:
            return []
        text_start, token_start = self._event_start
        text, calls = self._content()
        if self._has_role and not self.finish_reason and len(text) <= text_start:
            return []
        self._event_start = len(text), len(self._tokens)
        text, tokens = text[text_start:], slice(token_start, None)
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        if not self._answer.is_chat:
            return [self._answer.event([self._fields({"text": text}, tokens)])]
        events = []
        if calls:
            # Alone, as OpenAI's client ends no call in the event that begins it.
            call_fields = [{"index": index} | call.fields() for index, call in enumerate(calls)]
            delta = role | {"content": text or None, "tool_calls": call_fields}
            events.append(self._answer.event([self._fields({"delta": delta}, tokens) | {"finish_reason": None}]))
            role, text, tokens = {}, "", slice(0)
        last = self._fields({"delta": role | {"content": text}}, tokens, calls_tools=bool(calls))
        return [*events, self._answer.event([last])]

    def _content(self) -> tuple[str, list[ToolCall]]:
        """The text without calls of tools, and the calls. While the text goes on, what may belong to a call is in neither."""
        if self._answer.reader is None:
            return self.text, []
        return (
            (self._answer.reader.spoken(self.text), [])
            if self.finish_reason is None
            else self._answer.reader.split(self.text)
        )

    def _fields(self, content: dict[str, Any], span: slice, *, calls_tools: bool = False) -> dict[str, Any]:
        logprobs, tokens, text_format = None, self._tokens[span], self._answer.text_format
        if self._answer.has_logprobs and self._answer.is_chat:
            logprobs = _chat_logprobs(text_format, tokens)
        elif self._answer.has_logprobs:
            logprobs = _completion_logprobs(text_format, tokens) | {"text_offset": self._starts.offsets()[span]}
        reason = "tool_calls" if calls_tools and self.finish_reason == "stop" else self.finish_reason
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}


class TextAnswer:
    """The answer to a request for completions or for a chat, whole or in events."""

    def __init__(self, fields: OpenAIFields, text_format: TextFormat | None, reader: CallReader | None) -> None:
        self.is_chat = isinstance(fields, ChatFields)
        self.is_stream = fields.stream
        self.reader = reader
        self.has_logprobs = fields.logprob_count is not None
        self.text_format = text_format
        self._includes_usage = fields.includes_usage
        id_prefix = "chatcmpl" if self.is_chat else "cmpl"
        self._heading = {"id": f"{id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": fields.model}

    def whole(self, choices: Sequence[TextChoice], usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer. Each choice names its version of the weights if an update came between them."""
        object_name = "chat.completion" if self.is_chat else "text_completion"
        is_mixed = len({choice.weight_version for choice in choices}) > 1
        return {
            **self._heading,
            **weight_fields(),
            "object": object_name,
            "choices": [
                choice.whole() | ({"weight_version": choice.weight_version} if is_mixed else {}) for choice in choices
            ],
            "usage": usage,
        }

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return an event; the one after the last part of the texts has no choices, but the usage."""
        object_name = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage_fields = {"usage": usage} if self._includes_usage else {}
        return {**self._heading, **weight_fields(), "object": object_name, "choices": choices, **usage_fields}


def _token_content(text_format: TextFormat | None, token: int) -> bytes:
    """The bytes of a token."""
    return b"" if text_format is None else text_format.token_bytes(token)


def _token_text(text_format: TextFormat | None, token: int) -> str:
    """A token as a text. Bytes that are no text are written as OpenAI writes them."""
    content = _token_content(text_format, token)
    try:
        return content.decode() if text_format is not None else f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite_logprob(logprob: float) -> float:
    """A logprob as JSON has it, which lacks infinity: OpenAI writes -9999 for a token that cannot be."""
    return max(logprob, _LEAST_LOGPROB)


def _completion_logprobs(text_format: TextFormat | None, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The logprobs of a completion: lists with an item for each token."""
    logprobs = [scored.logprobs for scored in tokens]
    return {
        "tokens": [_token_text(text_format, scored.token) for scored in tokens],
        "token_logprobs": [None if entry is None else _finite_logprob(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            None
            if entry is None
            else {_token_text(text_format, token): _finite_logprob(logprob) for token, logprob in entry.likeliest}
            | {_token_text(text_format, scored.token): _finite_logprob(entry.logprob)}
            for scored, entry in zip(tokens, logprobs, strict=True)
        ],
    }


def _chat_logprobs(text_format: TextFormat | None, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The logprobs of a message: an object for each token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = _token_content(text_format, token)
        return {"token": _token_text(text_format, token), "logprob": _finite_logprob(logprob), "bytes": list(content)}

    content = []
    for scored in tokens:
        assert scored.logprobs is not None
        likeliest = [entry(token, logprob) for token, logprob in scored.logprobs.likeliest]
        content.append(entry(scored.token, scored.logprobs.logprob) | {"top_logprobs": likeliest})
    return {"content": content, "refusal": None}
