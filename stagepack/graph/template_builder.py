"""The names at all places of a region -> one template, and the texts that a call has for its holes."""

import re

from stagepack.format.template import Hole, escape_template

_PIECE = re.compile(r"[0-9]+|[^\W\d_]+|[\W_]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class TemplateBuilder:
    """The holes of a region.

    Attributes:
        texts: for each hole, its text at each place.
    """

    def __init__(self) -> None:
        self.texts: list[tuple[str, ...]] = []
        self._text: dict[tuple[str, ...], int] = {}
        self._steps: dict[tuple[int, ...], tuple[int, int]] = {}  # how numbers grow -> a hole, and its first number
        self._template: dict[tuple[str, ...], str] = {}

    def template(self, texts: tuple[str, ...]) -> str:
        """A template that gives these texts, one a place."""
        if texts not in self._template:
            self._template[texts] = self._make(texts)
        return self._template[texts]

    def _make(self, texts: tuple[str, ...]) -> str:
        if len(set(texts)) == 1:
            return escape_template(texts[0])
        pieces = [_PIECE.findall(text) for text in texts]
        same = len({len(found) for found in pieces}) == 1
        if not same or any("".join(found) != text for found, text in zip(pieces, texts, strict=True)):
            return str(self._hole(texts))
        columns = zip(*pieces, strict=True)
        return "".join(
            escape_template(column[0]) if len(set(column)) == 1 else str(self._hole(column)) for column in columns
        )

    def _hole(self, texts: tuple[str, ...]) -> Hole:
        if not all(map(_NUMBER.fullmatch, texts)):
            if texts not in self._text:
                self._text[texts] = self._new(texts)
            return Hole(self._text[texts])
        numbers = list(map(int, texts))
        steps = tuple(number - numbers[0] for number in numbers)
        if steps not in self._steps:
            self._steps[steps] = (self._new(texts), numbers[0])
        hole, begin = self._steps[steps]
        return Hole(hole, numbers[0] - begin)

    def _new(self, texts: tuple[str, ...]) -> int:
        self.texts.append(texts)
        return len(self.texts) - 1
