"""The names in all runs of a region -> one template, and the texts with which a call fills its holes."""

import re

from stagepack.format.unfold import Hole, escape_template

_PIECE = re.compile(r"[0-9]+|[^\W\d_]+|[\W_]+")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class TemplateBuilder:
    """The holes of a region while its templates are made.

    Law: ``fill_template(builder.template(names), [texts[run] for texts in builder.hole_texts]) == names[run]``.

    Attributes:
        hole_texts: for each hole, its text in each run.
    """

    def __init__(self) -> None:
        self.hole_texts: list[tuple[str, ...]] = []
        self._templates: dict[tuple[str, ...], str] = {}
        self._text_holes: dict[tuple[str, ...], int] = {}
        # For holes with integers: their differences from the first -> the hole, and its first integer.
        self._integer_holes: dict[tuple[int, ...], tuple[int, int]] = {}

    def template(self, run_names: tuple[str, ...]) -> str:
        """Return a template for names that differ from run to run; equal names have equal templates."""
        if run_names not in self._templates:
            self._templates[run_names] = self._make_template(run_names)
        return self._templates[run_names]

    def _make_template(self, run_names: tuple[str, ...]) -> str:
        if len(set(run_names)) == 1:
            return escape_template(run_names[0])
        pieces = [_PIECE.findall(run_name) for run_name in run_names]
        is_complete = all("".join(parts) == run_name for parts, run_name in zip(pieces, run_names, strict=True))
        if not is_complete or len({len(parts) for parts in pieces}) > 1:
            return str(self._hole(run_names))
        return "".join(
            escape_template(column[0]) if len(set(column)) == 1 else str(self._hole(column))
            for column in zip(*pieces, strict=True)
        )

    def _hole(self, run_texts: tuple[str, ...]) -> Hole:
        """A hole for these texts; integers that grow alike from run to run share one."""
        if not all(map(_INTEGER.fullmatch, run_texts)):
            if run_texts not in self._text_holes:
                self._text_holes[run_texts] = self._new_hole(run_texts)
            return Hole(self._text_holes[run_texts])
        integers = list(map(int, run_texts))
        differences = tuple(integer - integers[0] for integer in integers)
        if differences not in self._integer_holes:
            self._integer_holes[differences] = (self._new_hole(run_texts), integers[0])
        hole_index, first_integer = self._integer_holes[differences]
        return Hole(hole_index, integers[0] - first_integer)

    def _new_hole(self, run_texts: tuple[str, ...]) -> int:
        self.hole_texts.append(run_texts)
        return len(self.hole_texts) - 1
