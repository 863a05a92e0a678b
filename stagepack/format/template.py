"""Templates: the names in regions, with holes such as in ``layers.{0}.norm`` and ``add_{1+3}`` (SPEC F2, F5)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stagepack.format import limits

# Possessive (++): what has matched is never given back, so that matching takes no memory for each character.
_TEMPLATE_PART = re.compile(
    r"\{(?P<text_index>0|[1-9][0-9]{0,5})(?P<increment>[+-][1-9][0-9]{0,17})?\}|(?P<literal>(?:[^{}]++|\{\{|\}\})++)"
)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class TemplateError(ValueError):
    """A string is not a template, or its holes cannot be filled with the given texts."""


class Hole(NamedTuple):
    """A hole of a template. A region call fills it with one of its texts.

    Attributes:
        text_index: the index of the text.
        increment: added to the text, which must then be a decimal number; 0 leaves the text as it is.
    """

    text_index: int
    increment: int = 0

    def __str__(self) -> str:
        """The hole as it is written in a template."""
        return f"{{{self.text_index}{self.increment:+d}}}" if self.increment else f"{{{self.text_index}}}"


def escape_template(literal: str) -> str:
    """Return the template without holes that is filled to `literal`."""
    return literal.replace("{", "{{").replace("}", "}}")


@lru_cache(maxsize=4096)
def parse_template(template: str) -> tuple[str | Hole, ...]:
    """Split a template into literal strings, with their braces unescaped, and holes.

    The result is the literals and holes in order.
    """
    if len(template) > limits.TEMPLATE_CHARACTERS:
        raise TemplateError(
            f"expected a template of at most {limits.TEMPLATE_CHARACTERS} characters, found {len(template)}: {template[:80]!r}"
        )
    parts: list[str | Hole] = []
    position = 0
    while position < len(template):
        match = _TEMPLATE_PART.match(template, position)
        if match is None:
            raise TemplateError(f"expected a template, found {template[:80]!r}")
        position = match.end()
        if match["literal"] is None:
            parts.append(Hole(int(match["text_index"]), int(match["increment"] or 0)))
        else:
            parts.append(match["literal"].replace("{{", "{").replace("}}", "}"))
    return tuple(parts)


def fill_template(template: str, hole_texts: Sequence[str]) -> str:
    """Fill the holes of a template."""
    parts = parse_template(template)
    filled = "".join([_filled(part, hole_texts) if isinstance(part, Hole) else part for part in parts])
    if len(filled) > limits.NAME_CHARACTERS:
        raise TemplateError(f"{template[:80]!r} is filled to over {limits.NAME_CHARACTERS} characters")
    return filled


def _filled(hole: Hole, hole_texts: Sequence[str]) -> str:
    if hole.text_index >= len(hole_texts):
        raise TemplateError(f"the hole {hole} has no text: the region call has {len(hole_texts)}")
    hole_text = hole_texts[hole.text_index]
    if len(hole_text) > limits.NAME_CHARACTERS:
        raise TemplateError(f"the text {hole_text[:80]!r} has over {limits.NAME_CHARACTERS} characters")
    if not hole.increment:
        return hole_text
    total = int(hole_text) + hole.increment if _DECIMAL.fullmatch(hole_text) else -1
    if total < 0:
        raise TemplateError(f"the hole {hole} cannot be filled with {hole_text[:80]!r}")
    return str(total)


def has_holes(template: str) -> bool:
    """Whether a template differs from the string that it is filled to: it has holes or escaped braces."""
    return "{" in template or "}" in template
