"""Answers of OpenAI's API: completions, chat completions, and the events of both.

Source: https://platform.openai.com/docs/api-reference.
"""

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any


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
