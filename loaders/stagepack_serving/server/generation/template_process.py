"""A process that fills in chat templates: `python -m` runs it, with a JSON object a line on standard input and on standard output.

A template is a program of whoever made the bundle. Jinja's sandbox keeps it from Python's internals, but not from taking all time and
memory: those of this process are limited. It imports nothing of stagepack, so that it starts fast.
"""

import datetime
import functools
import json
import resource
import sys
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_MEMORY_BYTES: Final = 1 << 29
_MAX_CPU_SECONDS: Final = 1
_MAX_TEXT_LENGTH: Final = 1_000_000  # characters


class _GenerationBlock(Extension):
    """The tag ``generation``, which marks the text of the assistant for training, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, variables: dict[str, Any]) -> str:
    """Fill in a template."""
    text = ""
    for piece in _compile(template).generate(**variables):
        text += piece
        if len(text) > _MAX_TEXT_LENGTH:
            raise TemplateError(f"expected a text of at most {_MAX_TEXT_LENGTH} characters, found more")
    return text


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _format_now(time_format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(time_format)


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
