"""A process that fills in chat templates: `python -m` runs it, with a JSON object a line on standard input and on standard output.

A template is a program of whoever made the bundle. Jinja's sandbox keeps it from Python's internals, but not from taking all time and
memory: this process has limits for both. It imports nothing of stagepack, so that it starts fast.
"""

import contextlib
import datetime
import functools
import json
import resource
import sys
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_MEMORY_BYTES: Final = 1 << 29
_MAX_CPU_SECONDS: Final = 1
_MAX_TEXT_LENGTH: Final = 1_000_000  # characters


# Where clients put the thoughts of a model; templates read the first name, and those of gpt-oss the second.
_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlock(Extension):
    """The tag ``generation``, which marks the text of the assistant for training, and is a scope of variables as that of a macro."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write_block"), [], [], body).set_lineno(line_number)

    def _write_block(self, caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """The namespace of templates, without the attributes that lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name an attribute `self`
        self, *values = args
        attributes = dict(*values, **kwargs)
        for attribute_name in attributes:
            _check_attribute_name(attribute_name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, attribute_name: str, value: Any) -> None:
        _check_attribute_name(attribute_name)
        super().__setitem__(attribute_name, value)


class _DictMaker:
    """The function ``dict`` of templates, which is not Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a dict of keys with one value."""
        return dict.fromkeys(*args)


class _WrittenPartsError(TemplateError):
    """A template writes a list of parts as if it was a text."""


class _Parts(list[Any]):
    """The parts of a content. Python's notation of a list is not what anybody means to write."""

    def __str__(self) -> str:
        raise _WrittenPartsError("expected a text in the place of a list of parts")


def render(template: str, variables: dict[str, Any]) -> str:
    """Fill in a template as ``apply_chat_template`` of transformers does.

    A template that knows no parts of contents gets their texts, where transformers fails, or writes a text without them.
    """
    messages = [_seen_message(message) for message in variables["messages"]]
    if any(isinstance(message.get("content"), list) for message in messages):
        form = _with_parts if _knows_parts(template, variables, messages) else _with_joined_parts
        messages = [form(message) for message in messages]
    return _fill_in(template, variables | {"messages": messages})


def _knows_parts(template: str, variables: dict[str, Any], messages: list[dict[str, Any]]) -> bool:
    """Whether a template writes all parts that it would write as one text, which is tried with numbers in the place of their texts."""
    part_numbers = [
        [f"{9_000_000 + index}{part_index:03}7" for part_index in range(_part_count(fields))]
        for index, fields in enumerate(messages)
    ]
    probes = [fields | _numbered_content(fields, own) for fields, own in zip(messages, part_numbers, strict=True)]
    try:
        with_parts = _fill_in(template, variables | {"messages": [_with_parts(probe) for probe in probes]})
    except Exception:  # noqa: BLE001 - a template raises any error
        return False
    try:
        with_texts = _fill_in(template, variables | {"messages": [_with_joined_parts(probe) for probe in probes]})
    except Exception:  # noqa: BLE001
        return True
    return all(number in with_parts or number not in with_texts for own in part_numbers for number in own)


def _part_count(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, list) else 0


def _numbered_content(message: dict[str, Any], part_numbers: list[str]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return {}
    return {"content": [part | {"text": number} for part, number in zip(message["content"], part_numbers, strict=True)]}


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": _Parts(content)} if isinstance(content, list) else message


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


def _fill_in(template: str, variables: dict[str, Any]) -> str:
    text = ""
    for piece in _compile(template).generate(**{"tools": None, "documents": None} | variables):
        text += piece
        if len(text) > _MAX_TEXT_LENGTH:
            raise TemplateError(f"expected a text of at most {_MAX_TEXT_LENGTH} characters, found more")
    return text


def _seen_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without fields that are None, and with the arguments of calls as objects."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[key] for key in _REASONING_NAMES if key in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_seen_call(call) for call in message["tool_calls"]]
    return message


def _seen_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments: Any = function["arguments"]
    # A model may have written what is no JSON: the template writes that text again.
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return call | {"function": function | {"arguments": arguments}}


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _DictMaker(),
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _format_now,
    }
    return environment.from_string(template)


def _check_attribute_name(attribute_name: Any) -> None:
    if isinstance(attribute_name, str) and attribute_name.startswith("_"):
        raise SecurityError(
            f"expected an attribute of a namespace without a leading underscore, found {attribute_name!r}"
        )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format_now(time_format: str) -> str:
    return datetime.datetime.now().strftime(time_format)  # without a time zone, as transformers has it


def _answer(line: bytes) -> dict[str, str]:
    """The text that one line asks for, or why there is none."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_limit = int(used.ru_utime + used.ru_stime) + 1 + _MAX_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, resource.RLIM_INFINITY))
    try:
        return {"text": render(**json.loads(line))}
    except Exception as error:  # noqa: BLE001 - a template raises any error
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    """Answer lines until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
