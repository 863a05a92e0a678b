"""Calls of tools in the texts of models, in the forms that chat templates teach.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": ...}</tool_call>` for each call; Mistral a list of such objects; Llama 3 an
object with `parameters`, or several between semicolons. The tokens `[TOOL_CALLS]` and `<|python_tag|>` before the latter two are special,
and so no text.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

_MARKER: Final = "<tool_call>"
_END_MARKER: Final = "</tool_call>"
_MARKED_CALL: Final = re.compile(rf"{_MARKER}(.*?)(?:{_END_MARKER}|\Z)", re.DOTALL)
# Markers of forms that are not read: the forms of Qwen 3 Coder, and of Mistral since 2025.
_OTHER_MARKERS: Final = ("<function=", "[ARGS]")
_SEPARATORS: Final = " \t\r\n;"


class _Function(Struct):
    """A function that a model may call."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool, which is a function."""

    type: Literal["function"]
    function: _Function


class FunctionName(Struct):
    """The name of a function."""

    name: str


class ChosenTool(Struct):
    """The tool that a model must call."""

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the name of the function, and its arguments as JSON."""

    name: str
    arguments: str

    def fields(self) -> dict[str, Any]:
        """Return the call as OpenAI has it, with an id of nine characters: templates of Mistral refuse others."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls.

    Attributes:
        arguments_key: the key of the arguments.
        is_marked: each call is between the markers of Hermes.
        is_list: all calls are in one list.
    """

    arguments_key: str = "arguments"
    is_marked: bool = False
    is_list: bool = False

    def frame(self) -> tuple[str, str]:
        """Return what is written before and after the JSON of a call."""
        return (f"{_MARKER}\n", f"\n{_END_MARKER}") if self.is_marked else ("", "")

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins and ends a call, which may be special tokens."""
        return (_MARKER, _END_MARKER) if self.is_marked else ()

    def schema(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the schema of the JSON of one call."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    self.arguments_key: tool.function.parameters or {"type": "object"},
                },
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if self.is_list else call


def form_of_template(template: str) -> CallForm | None:
    """Return how a model with this chat template writes calls; None for a template without tools, or for another form."""
    if not re.search(r"\btools\b", template) or any(marker in template for marker in _OTHER_MARKERS):
        return None
    if _MARKER in template:
        return CallForm(is_marked=True)
    if "[TOOL_CALLS]" in template:
        return CallForm(is_list=True)
    return CallForm(arguments_key="parameters") if "ipython" in template else None


@dataclass(frozen=True, slots=True)
class CallReader:
    """Finds the calls in texts. A text whose calls are not JSON, or call other functions, has none.

    Attributes:
        form: how the model writes calls.
        names: the functions that it may call.
        most_calls: how many calls of a text are read.
    """

    form: CallForm
    names: frozenset[str]
    most_calls: int | None = None

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return what a whole text says, and its calls."""
        start = text.find(_MARKER) if self.form.is_marked else 0
        if start < 0:
            return text, []
        parts = _MARKED_CALL.findall(text[start:]) if self.form.is_marked else [text]
        try:
            calls = [self._call(value) for part in parts for value in _json_values(part)]
        except (ValueError, RecursionError):
            return text, []
        return (text[:start], calls[: self.most_calls]) if calls else (text, [])

    def spoken(self, text: str) -> str:
        """Return what the beginning of a text says, without what may belong to a call."""
        if not self.form.is_marked:
            return "" if text.lstrip()[:1] in ("", "[", "{") else text
        start = text.find(_MARKER)
        longest = min(len(text), len(_MARKER) - 1)
        held = next((length for length in range(longest, 0, -1) if text.endswith(_MARKER[:length])), 0)
        return text[:start] if start >= 0 else text[: len(text) - held]

    def _call(self, value: Any) -> ToolCall:
        name, arguments = (
            (value.get("name"), value.get(self.form.arguments_key)) if isinstance(value, dict) else (None, None)
        )
        if name not in self.names or not isinstance(arguments, dict):
            raise ValueError("no call of a function of the request")
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _json_values(text: str) -> Iterator[Any]:
    """The objects of a text: one, several between semicolons, or a list of them."""
    text = text.strip(_SEPARATORS)
    while text:
        value, end = _DECODER.raw_decode(text)
        yield from value if isinstance(value, list) else [value]
        text = text[end:].lstrip(_SEPARATORS)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
