"""The fields of requests for texts over OpenAI's API.

Source: https://platform.openai.com/docs/api-reference. Fields that change nothing of the answer are ignored, which the log says; fields
that would, and that this server does not support, are refused.
"""

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from stagepack.format.limits import Int64
from stagepack.format.rules import JSON_ERRORS
from stagepack_serving.server.errors import FieldError
from stagepack_serving.server.rest_large_request import decode_field, decode_fields, split_fields
from stagepack_text.openai.messages import read_messages
from stagepack_text.server.sampling_fields import SamplingFields, TokenCount, convert_fields
from stagepack_text.server.tool_calls import ChosenTool, Tool

_Bias = Annotated[float, Meta(ge=-100, le=100)]
_OpenStopStrings = Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=16)]
_LogprobCount = Annotated[int, Meta(ge=0, le=20)]
# Fields that say nothing of the answer.
IGNORED_FIELDS: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
# Fields that ask for what this server does not have, unless they have one of these values.
_NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "suffix": ("",),
    "web_search_options": (),
}
# Fields that may be large.
_PROMPT_FIELDS: Final = frozenset({"input", "messages", "prompt"})
# Texts of one request: the limit of OpenAI for embeddings.
_MOST_TEXTS: Final = 2048
_NESTED_LIST: Final = re.compile(rb"\s*\[\s*\[")
_LOG: Final = logging.getLogger("stagepack.serve")


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of an answer that is a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # of OpenAI's network, which this server is not


class OpenAIFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of requests have."""

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    default_count: ClassVar[int | None] = None  # a chat may take all positions that are left

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, _Bias] = {}  # noqa: RUF012 - msgspec copies it
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: str | _OpenStopStrings | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation."""
        return super().settings() | ({"logit_bias": self.logit_bias} if self.logit_bias else {})

    def stop_strings(self) -> list[str]:
        """Return the strings that end the text."""
        return [stop for stop in super().stop_strings() if stop]

    @property
    @abstractmethod
    def logprob_count(self) -> int | None:
        """How many of the likeliest tokens each token has beside its own logprob; None for no logprobs."""


class CompletionFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A request for the continuations of a text, or of several: a string or tokens, or a list of either."""

    default_count: ClassVar[int | None] = 16  # of `max_tokens`, as OpenAI has it

    prompt: Raw
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: _LogprobCount | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def logprob_count(self) -> int | None:
        """How many of the likeliest tokens each token has beside its own logprob; None for no logprobs."""
        return self.logprobs

    def prompts(self, *, has_tokens: bool) -> Sequence[str | Raw]:
        """Return the prompts, each a text or JSON.

        has_tokens: a prompt that is no text is a list of tokens, and not of other numbers, which may be nested.
        """
        try:
            prompt = msgspec.json.decode(self.prompt, type=str | list[str])
        except msgspec.ValidationError:
            is_nested = _NESTED_LIST.match(memoryview(self.prompt)) is not None
            prompt = decode_field("prompt", self.prompt, list[Raw]) if has_tokens and is_nested else [self.prompt]
        except JSON_ERRORS as error:
            raise FieldError("prompt", str(error)) from None
        prompts: list[str | Raw] = [prompt] if isinstance(prompt, str) else prompt
        if not 1 <= len(prompts) * self.n <= _MOST_TEXTS:
            expected = f"a string, the tokens of one, or a list of either, with `n` for 1 to {_MOST_TEXTS} texts in all"
            raise FieldError("prompt", f"expected {expected}, found {len(prompts)} prompts")
        return prompts

    def check(self) -> None:
        """Check what the types of the fields do not say."""
        if self.best_of not in (None, self.n):
            message = f"expected that of n, {self.n}, as this server ranks no texts, found {self.best_of}"
            raise FieldError("best_of", message)
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "expected 1 or more, or `echo`, found 0")


class JsonSchema(Struct):
    """A schema of an answer; its name and description say nothing here, and `strict` is as if it was true."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What an answer is: a text, or JSON, of a schema or of any."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema(self) -> dict[str, Any] | bool | None:
        """Return the schema that an answer satisfies; None for a text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            expected = "`json_schema` with the type json_schema, and only with it"
            raise FieldError("response_format", f"expected {expected}")
        if self.json_schema is None:
            return {"type": "object"} if self.type == "json_object" else None
        return self.json_schema.schema


class _Tools(Struct):
    tools: Annotated[list[Tool], Meta(max_length=128)]


class ChatFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """A request for the next message of a conversation. The fields of messages are those that the chat template knows."""

    messages: Raw
    max_completion_tokens: TokenCount | None = None  # the newer name of `max_tokens`
    logprobs: bool = False
    top_logprobs: _LogprobCount = 0
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - msgspec copies it
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True

    def schema(self) -> dict[str, Any] | bool | None:
        """Return the JSON schema that an answer satisfies; None for a text."""
        return None if self.response_format is None else self.response_format.schema()

    @property
    def logprob_count(self) -> int | None:
        """How many of the likeliest tokens each token has beside its own logprob; None for no logprobs."""
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        """Check what the types of the fields do not say."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", f"expected `logprobs` to be true, found {self.top_logprobs} without it")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise FieldError("tool_choice", "expected `tools` beside it, found none")
        if self.callable_tools() and self.schema() is not None:
            message = "expected a text beside `tools`: a call of a tool is not JSON of the schema"
            raise FieldError("response_format", message)

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        tools: list[Tool] = convert_fields({"tools": self.tools}, _Tools).tools
        if not isinstance(self.tool_choice, ChosenTool):
            return tools
        chosen_name = self.tool_choice.function.name
        chosen_tools = [tool for tool in tools if tool.function.name == chosen_name]
        if not chosen_tools:
            raise FieldError("tool_choice", f"expected the name of one of `tools`, found {chosen_name!r}")
        return chosen_tools

    @property
    def must_call(self) -> bool:
        """Whether the answer calls a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as the chat template reads them."""
        return read_messages(self.messages)

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation."""
        renamed = {} if self.max_completion_tokens is None else {"max_new_tokens": self.max_completion_tokens}
        return super().settings() | renamed


class EmbeddingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request for embeddings of a text or its tokens, or of a list of either.

    In base64, embeddings are the bytes of float32 numbers. The name of the prompt that is put before texts is not in OpenAI's API.
    """

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES

    model: str
    input: Raw
    dimensions: TokenCount | None = None
    encoding_format: Literal["float", "base64"] = "float"
    prompt_name: str | None = None

    def check(self) -> None:
        """Check what the types of the fields do not say: nothing."""

    def sentences(self) -> list[str] | list[list[int]]:
        """Return the texts or the tokens of each text."""
        expected = f"expected a text, the tokens of a text, or a list of 1 to {_MOST_TEXTS} texts or lists of tokens"
        try:
            value = msgspec.json.decode(self.input, type=str | list[str | Int64 | list[Int64]])
        except JSON_ERRORS as error:
            raise FieldError("input", f"{expected}: {error}") from None
        sentences: list[Any] = [value] if isinstance(value, str) else value
        if sentences and all(isinstance(item, int) for item in sentences):
            sentences = [sentences]
        is_uniform = len({type(item) for item in sentences}) == 1 and not isinstance(sentences[0], int)
        if not is_uniform or len(sentences) > _MOST_TEXTS or [] in sentences:
            raise FieldError("input", expected)
        return sentences


class RequestFields(Protocol):
    """The fields of a request of any kind.

    Attributes:
        ignored_fields: fields that change no answer.
        neutral_values: the values of fields that are refused with any other.
    """

    ignored_fields: ClassVar[frozenset[str]]
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]]
    __struct_fields__: ClassVar[tuple[str, ...]]


def decode_openai_request(body: bytearray, fields_type: type[RequestFields]) -> Any:
    """Decode the body of a request."""
    # `null` is as if the field was absent.
    raw_fields = {field_name: value for field_name, value in split_fields(body).items() if bytes(value) != b"null"}
    if ignored_names := sorted(fields_type.ignored_fields & raw_fields.keys()):
        _LOG.info("ignored fields of a request, which change no answer: %s", ", ".join(ignored_names))
    raw_fields = {field_name: value for field_name, value in raw_fields.items() if field_name not in ignored_names}
    prompts = {field_name: raw_fields.pop(field_name) for field_name in _PROMPT_FIELDS & raw_fields.keys()}
    fields = decode_fields(raw_fields)
    for field_name in fields.keys() & fields_type.neutral_values.keys():
        if fields.pop(field_name) not in fields_type.neutral_values[field_name]:
            raise FieldError(field_name, "this server does not support it: leave it out")
    request = convert_fields(fields | prompts, fields_type)
    request.check()
    return request


def use_of_field(fields_type: type[RequestFields], field_name: str) -> str:
    """Return what requests of a type do with a field: it is "served", "ignored" or "refused"."""
    if field_name in fields_type.__struct_fields__:
        return "served"
    return "ignored" if field_name in fields_type.ignored_fields else "refused"
