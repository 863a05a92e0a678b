"""Pictures of a cut, as SVG elements."""

from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from stagepack.cli.diagram import arrows
from stagepack.cli.quantities import format_bytes
from stagepack.cli.report.html_element import element

_WIDTH, _HEIGHT, _GAP, _SIDE = (
    116,
    52,
    104,
    56,
)  # of a stage, of the room between two, and of the words at both ends, in pixels
_RISE, _STEP = 26, 16  # how high an arc stands over one stage, and how much more over each further one


def bar(kind: str, part: float) -> Element:
    """A bar that is filled to a part between 0 and 1; `kind` says in which colour."""
    return element(
        "svg",
        element("rect", width="100%", height="100%"),
        element("rect", width=f"{100 * part:.2f}%", height="100%", class_=kind),
        aria_hidden="true",
    )


def columns(parts: list[float], title: str) -> Element:
    """A chart of columns between 0 and 1, numbered from 1."""
    height, step = 120, 20
    marks = [
        element("text", f"{level:.0%}", x=36, y=height * (1 - level) + 14, text_anchor="end", class_="soft")
        for level in (0.0, 0.5, 1.0)
    ]
    drawn = [
        element(
            "rect",
            element("title", f"{number}: {part:.1%}"),
            x=26 + number * step,
            y=10 + height * (1 - part),
            width=step - 4,
            height=max(height * part, 1),
        )
        for number, part in enumerate(parts, start=1)
    ]
    numbers = [
        element("text", str(number), x=26 + number * step + 8, y=height + 26, text_anchor="middle", class_="soft")
        for number in (1, *range(4, len(parts) + 1, 4))
    ]
    size = {"width": 36 + step * (len(parts) + 1), "height": height + 34}
    return element("svg", marks, drawn, numbers, class_="bubble", role="img", aria_label=title, **size)


def pipeline(facts: dict[str, Any]) -> Element:
    """The stages in a row, and an arrow for what each gives to another: skips above, in another colour; inputs and results below."""
    stages = facts["stages"]
    ends = [(source, target, names, size) for source, target, names, size in arrows(facts)]
    ends += [
        (f"stage{edge['producer']}", "result", edge["name"], edge["bytes"])
        for edge in facts["edges"]
        if edge["result"] and edge["producer"] is not None
    ]
    place = {"input": -1, "result": len(stages)} | {f"stage{number}": number for number in range(len(stages))}
    above = max(
        (_rise(place[target] - place[source]) for source, target, *_ in ends if _is_skip(source, target)), default=0
    )
    below = max(
        (_rise(place[target] - place[source]) for source, target, *_ in ends if not _is_skip(source, target)), default=0
    )
    top = above + 16
    drawn: list[Element] = []
    for source, target, names, size in ends:
        label = f"{names}: {format_bytes(size)}"
        drawn += _arrow(place[source], place[target], _is_skip(source, target), top, format_bytes(size), label)
    boxes = [box for stage in stages for box in _stage(stage, top)]
    middle = top + _HEIGHT / 2 + 4
    words = [
        element("text", "input", x=_SIDE / 2, y=middle, text_anchor="middle"),
        element("text", "result", x=_left(len(stages)) + _SIDE / 2, y=middle, text_anchor="middle"),
    ]
    room = {"width": _left(len(stages)) + _SIDE, "height": top + _HEIGHT + below + 20}
    return element(
        "svg", drawn, boxes, words, role="img", aria_label="the stages and what crosses between them", **room
    )


def _is_skip(source: str, target: str) -> bool:
    return source != "input" and target != "result"


def _rise(span: int) -> int:
    return 0 if span < 2 else _RISE + _STEP * span


def _left(place: int) -> int:
    """Where a stage begins; -1 is the input."""
    return 0 if place < 0 else _SIDE + _GAP + place * (_WIDTH + _GAP)


def _stage(stage: dict[str, Any], top: int) -> Iterator[Element]:
    left = _left(stage["stage"])
    name = stage["starts_at"] or "the model"
    yield element(
        "rect", element("title", f"starts at {name}"), x=left, y=top, width=_WIDTH, height=_HEIGHT, rx=4, class_="stage"
    )
    yield element("text", f"stage {stage['stage']}", x=left + _WIDTH / 2, y=top + 21, text_anchor="middle")
    weights = format_bytes(stage["weight_bytes"])
    yield element("text", weights, x=left + _WIDTH / 2, y=top + 39, text_anchor="middle", class_="soft")


def _arrow(source: int, target: int, skip: bool, top: int, text: str, title: str) -> list[Element]:
    """A line to the next stage, or an arc over or under those between."""
    span = target - source
    if span == 1:
        left, right, level = _left(source) + (_SIDE if source < 0 else _WIDTH), _left(target), top + _HEIGHT / 2
        path = f"M{left} {level:g}H{right - 7}"
        head = f"{right},{level:g} {right - 8},{level - 4:g} {right - 8},{level + 4:g}"
        x, y, kind = (left + right) / 2, level - 7, ""
    else:
        sign, edge = (-1, top) if skip else (1, top + _HEIGHT)
        begin, end = _middle(source) + 14, _middle(target) - 14
        far = edge + sign * _rise(span)
        path = f"M{begin:g} {edge}C{begin:g} {far} {end:g} {far} {end:g} {edge + sign * 7}"
        head = f"{end:g},{edge} {end - 4:g},{edge + sign * 8} {end + 4:g},{edge + sign * 8}"
        x, y, kind = (begin + end) / 2, edge + sign * 0.75 * _rise(span) + (-5 if skip else 14), " skip" if skip else ""
    return [
        element("path", element("title", title), d=path, class_=f"edge{kind}"),
        element("polygon", points=head, class_=f"head{kind}"),
        element("text", text, x=x, y=y, text_anchor="middle", class_=kind.strip() or "soft"),
    ]


def _middle(place: int) -> float:
    return _SIDE / 2 if place < 0 else _left(place) + _WIDTH / 2
