"""Requests of OpenAI's API for completions and chat completions.

Source: https://platform.openai.com/docs/api-reference. Fields that change nothing of the answer are ignored; fields that would, and that
this server does not support, are refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from stagepack.format.codec import JSON_ERRORS
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.sampling_fields import SamplingFields, convert_fields
from stagepack_serving.server.rest_large_request import decode_field, decode_fields, split_fields

# OpenAI's default of `max_tokens` for completions. A chat may take all positions that are left.
_COMPLETION_TOKENS: Final = 16

# Fields that say nothing of the answer.
_IGNORED_FIELDS: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that ask for what this server does not have, unless they have one of these values.
_NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Fields that may be large.
_PROMPT_FIELDS: Final = frozenset({"messages", "prompt"})


class StreamOptions(Struct, kw_only=True):
    """Options of an answer that is a stream."""

    include_usage: bool = False


class OpenAIFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of requests have.

    Attributes:
        model: the name of the model.
        stream: send each part of the text when it is generated.
        stream_options: options of such an answer.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A request for the continuation of a text.

    Attributes:
        prompt: a string or tokens, also as the only item of a list.
    """

    prompt: Raw

    def single_prompt(self) -> str | Raw:
        """Return the prompt.

        Returns:
            A string; or what may be tokens.

        Raises:
            RequestError: there are several prompts or none.
        """
        try:
            prompt = msgspec.json.decode(self.prompt, type=str | list[str])
        except msgspec.ValidationError:
            return self.prompt
        except JSON_ERRORS as error:
            raise RequestError(RequestStatus.BAD_REQUEST, f"prompt: {error}") from None
        prompts: list[str] = [prompt] if isinstance(prompt, str) else prompt
        if len(prompts) != 1:
            raise RequestError(RequestStatus.BAD_REQUEST, "prompt: expected one string, or the tokens of one prompt")
        return prompts[0]

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation; see `SamplingFields.settings`.

        Returns:
            The settings.
        """
        return {"max_new_tokens": _COMPLETION_TOKENS} | super().settings()


class _TextPart(Struct):
    """A part of a message."""

    type: Literal["text"]
    text: str


class _MessageHead(Struct):
    """What all messages have."""

    role: str
    content: str | list[_TextPart] | None = None

    def text(self) -> str | None:
        """The content, which may be in parts, as one text."""
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


class ChatFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A request for the next message of a conversation.

    Attributes:
        messages: the messages, whose fields are those that the chat template knows.
        max_completion_tokens: the newer name of `max_tokens`.
    """

    messages: Raw
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as templates expect them: each content is one string.

        Returns:
            The messages. Their other fields are JSON.

        Raises:
            RequestError: there are none, or a message has no role, or a content that is no text.
        """
        heads = decode_field("messages", self.messages, Annotated[list[_MessageHead], Meta(min_length=1)])
        messages = decode_field("messages", self.messages, list[dict[str, Raw]])
        return [message | {"content": head.text()} for head, message in zip(heads, messages, strict=True)]

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation; see `SamplingFields.settings`.

        Returns:
            The settings.
        """
        renamed = {} if self.max_completion_tokens is None else {"max_new_tokens": self.max_completion_tokens}
        return super().settings() | renamed


def decode_openai_request(body: bytearray, fields_type: type[OpenAIFields]) -> Any:
    """Decode the body of a request.

    Args:
        body: the body.
        fields_type: `CompletionFields` or `ChatFields`.

    Returns:
        The fields.

    Raises:
        RequestError: the body is no JSON object, or a field is wrong, unknown or not supported.
    """
    raw_fields = {
        field_name: value for field_name, value in split_fields(body).items() if field_name not in _IGNORED_FIELDS
    }
    prompts = {field_name: raw_fields.pop(field_name) for field_name in _PROMPT_FIELDS & raw_fields.keys()}
    fields = decode_fields(raw_fields)
    for field_name in fields.keys() & _NEUTRAL_VALUES.keys():
        if fields.pop(field_name) not in (None, *_NEUTRAL_VALUES[field_name]):
            message = f"{field_name}: this server does not support it: leave it out"
            raise RequestError(RequestStatus.BAD_REQUEST, message)
    return convert_fields(fields | prompts, fields_type)
