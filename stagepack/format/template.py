"""Texts with holes, as regions have them: ``layers.{0}.norm``, ``add_{1+3}`` (SPEC F2, F5)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stagepack.format import limits

_PART = re.compile(r"\{(?P<hole>0|[1-9][0-9]{0,5})(?P<plus>[+-][1-9][0-9]{0,17})?\}|(?P<text>(?:[^{}]|\{\{|\}\})+)")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class TemplateError(ValueError):
    """A text is not a template, or its holes cannot be filled so."""


class Hole(NamedTuple):
    """A place in a template: the text of this number, or the number that it is plus another."""

    text_index: int
    increment: int = 0

    def __str__(self) -> str:
        """As it is written."""
        return f"{{{self.text_index}{self.increment:+d}}}" if self.increment else f"{{{self.text_index}}}"


def escape_template(text: str) -> str:
    """The template that gives this text."""
    return text.replace("{", "{{").replace("}", "}}")


@lru_cache(maxsize=4096)
def parse_template(template: str) -> tuple[str | Hole, ...]:
    """The parts of a template.

    Raises:
        TemplateError: it is not one.
    """
    parts: list[str | Hole] = []
    at = 0
    while at < len(template):
        found = _PART.match(template, at)
        if found is None:
            raise TemplateError(f"{template[:80]!r} is not a text with holes")
        at = found.end()
        if found["text"] is None:
            parts.append(Hole(int(found["hole"]), int(found["plus"] or 0)))
        else:
            parts.append(found["text"].replace("{{", "{").replace("}}", "}"))
    return tuple(parts)


def fill_template(template: str, texts: Sequence[str]) -> str:
    """A template with texts in its holes.

    Raises:
        TemplateError: it is not one, there is no text for a hole, a number is added to what is none, or the result is under 0 or
            too long.
    """
    found = "".join([_filled(part, texts) if isinstance(part, Hole) else part for part in parse_template(template)])
    if len(found) > limits.NAME_CHARACTERS:
        raise TemplateError(f"{template[:80]!r} becomes a text of over {limits.NAME_CHARACTERS} characters")
    return found


def _filled(hole: Hole, texts: Sequence[str]) -> str:
    if hole.text_index >= len(texts):
        raise TemplateError(f"the hole {hole} has no text")
    text = texts[hole.text_index]
    if not hole.increment:
        return text
    number = int(text) + hole.increment if _NUMBER.fullmatch(text) else -1
    if number < 0:
        raise TemplateError(f"the hole {hole} cannot be filled with {text[:80]!r}")
    return str(number)


def has_holes(template: str) -> bool:
    """Whether a template gives another text than itself."""
    return "{" in template or "}" in template
