"""Drawings of a cut as SVG elements. Lengths are in pixels."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from stagepack.cli.quantities import format_bytes
from stagepack.cli.report.html_element import html_element
from stagepack.cli.stage_diagram import arrows, edges_label

_STAGE_WIDTH, _STAGE_HEIGHT = 116, 52
_STAGE_GAP = 104
_END_WIDTH = 56  # of the words `input` and `result`
_ARC_HEIGHT, _ARC_HEIGHT_PER_STAGE = 26, 16  # of an arc over one stage, and more for each further one
_CHART_HEIGHT, _CHART_STEP = 120, 20


class _Connection(NamedTuple):
    """An arrow of the drawing, between two positions: -1 is the input, then the stages, then the result."""

    source: int
    target: int
    is_skip: bool
    title: str
    byte_count: int

    @property
    def arc_height(self) -> int:
        """Height of the arc over the stages between the two ends, 0 for a straight arrow."""
        span = self.target - self.source
        return 0 if span < 2 else _ARC_HEIGHT + _ARC_HEIGHT_PER_STAGE * span


def bar(color_class: str, share: float) -> Element:
    """Return a bar that is filled to a share between 0 and 1, in the color of a CSS class."""
    return html_element(
        "svg",
        html_element("rect", width="100%", height="100%"),
        html_element("rect", width=f"{100 * share:.2f}%", height="100%", class_=color_class),
        aria_hidden="true",
    )


def column_chart(shares: Sequence[float], title: str) -> Element:
    """Return a chart of columns between 0 and 1, numbered from 1."""
    level_labels = [
        html_element("text", f"{level:.0%}", x=36, y=_CHART_HEIGHT * (1 - level) + 14, text_anchor="end", class_="soft")
        for level in (0.0, 0.5, 1.0)
    ]
    columns = [
        html_element(
            "rect",
            html_element("title", f"{column_number}: {share:.1%}"),
            x=26 + column_number * _CHART_STEP,
            y=10 + _CHART_HEIGHT * (1 - share),
            width=_CHART_STEP - 4,
            height=max(_CHART_HEIGHT * share, 1),
        )
        for column_number, share in enumerate(shares, start=1)
    ]
    column_labels = [
        html_element(
            "text",
            str(column_number),
            x=26 + column_number * _CHART_STEP + 8,
            y=_CHART_HEIGHT + 26,
            text_anchor="middle",
            class_="soft",
        )
        for column_number in (1, *range(4, len(shares) + 1, 4))
    ]
    size = {"width": 36 + _CHART_STEP * (len(shares) + 1), "height": _CHART_HEIGHT + 34}
    return html_element(
        "svg", level_labels, columns, column_labels, class_="bubble", role="img", aria_label=title, **size
    )


def pipeline_drawing(cut_facts: dict[str, Any]) -> Element:
    """Return the stages in a row, and an arrow for the values from each stage to each other stage.

    Arrows that skip stages are above the stages and in another color; those from the input and to the result are below.
    """
    stages = cut_facts["stages"]
    connections = list(_connections(cut_facts))
    height_above = max((connection.arc_height for connection in connections if connection.is_skip), default=0)
    height_below = max((connection.arc_height for connection in connections if not connection.is_skip), default=0)
    top = height_above + 16
    text_level = top + _STAGE_HEIGHT / 2 + 4
    result_center = _left_of(len(stages)) + _END_WIDTH / 2
    return html_element(
        "svg",
        [element for connection in connections for element in _arrow(connection, top)],
        [element for stage in stages for element in _stage_box(stage, top)],
        html_element("text", "input", x=_END_WIDTH / 2, y=text_level, text_anchor="middle"),
        html_element("text", "result", x=result_center, y=text_level, text_anchor="middle"),
        role="img",
        aria_label="the stages and the values that cross between them",
        width=_left_of(len(stages)) + _END_WIDTH,
        height=top + _STAGE_HEIGHT + height_below + 20,
    )


def _connections(cut_facts: dict[str, Any]) -> Iterator[_Connection]:
    stage_count = len(cut_facts["stages"])
    positions = {"input": -1} | {f"stage{stage_number}": stage_number for stage_number in range(stage_count)}
    for arrow in arrows(cut_facts):
        yield _Connection(
            source=positions[arrow.source],
            target=positions[arrow.target],
            is_skip=arrow.source != "input",
            title=f"{arrow.label}: {format_bytes(arrow.byte_count)}",
            byte_count=arrow.byte_count,
        )
    for producer in range(stage_count):
        results = [edge for edge in cut_facts["edges"] if edge["result"] and edge["producer"] == producer]
        if results:
            byte_count = sum(edge["bytes"] for edge in results)
            title = f"{edges_label(results)}: {format_bytes(byte_count)}"
            yield _Connection(producer, stage_count, is_skip=False, title=title, byte_count=byte_count)


def _left_of(position: int) -> int:
    """Return the left edge of a position."""
    return 0 if position < 0 else _END_WIDTH + _STAGE_GAP + position * (_STAGE_WIDTH + _STAGE_GAP)


def _center_of(position: int) -> float:
    return _END_WIDTH / 2 if position < 0 else _left_of(position) + _STAGE_WIDTH / 2


def _stage_box(stage: dict[str, Any], top: int) -> Iterator[Element]:
    center = _center_of(stage["stage"])
    yield html_element(
        "rect",
        html_element("title", f"starts at {stage['starts_at'] or 'the model'}"),
        x=_left_of(stage["stage"]),
        y=top,
        width=_STAGE_WIDTH,
        height=_STAGE_HEIGHT,
        rx=4,
        class_="stage",
    )
    yield html_element("text", f"stage {stage['stage']}", x=center, y=top + 21, text_anchor="middle")
    weight_size = format_bytes(stage["weight_bytes"])
    yield html_element("text", weight_size, x=center, y=top + 39, text_anchor="middle", class_="soft")


def _arrow(connection: _Connection, top: int) -> list[Element]:
    """Return a line to the next stage, or an arc over or under the stages between."""
    skip_class = " skip" if connection.is_skip and connection.arc_height else ""
    if connection.arc_height:
        path, head, label_x, label_y = _arc_shape(connection, top)
    else:
        path, head, label_x, label_y = _line_shape(connection, top)
    return [
        html_element("path", html_element("title", connection.title), d=path, class_=f"edge{skip_class}"),
        html_element("polygon", points=head, class_=f"head{skip_class}"),
        html_element(
            "text",
            format_bytes(connection.byte_count),
            x=label_x,
            y=label_y,
            text_anchor="middle",
            class_=skip_class.strip() or "soft",
        ),
    ]


def _line_shape(connection: _Connection, top: int) -> tuple[str, str, float, float]:
    """Return the path, the points of the head, and the position of the label of a straight arrow."""
    start = _left_of(connection.source) + (_END_WIDTH if connection.source < 0 else _STAGE_WIDTH)
    end, level = _left_of(connection.target), top + _STAGE_HEIGHT / 2
    head = f"{end},{level:g} {end - 8},{level - 4:g} {end - 8},{level + 4:g}"
    return f"M{start} {level:g}H{end - 7}", head, (start + end) / 2, level - 7


def _arc_shape(connection: _Connection, top: int) -> tuple[str, str, float, float]:
    """Return the path, the points of the head, and the position of the label of an arc."""
    direction, base = (-1, top) if connection.is_skip else (1, top + _STAGE_HEIGHT)
    start, end = _center_of(connection.source) + 14, _center_of(connection.target) - 14
    peak = base + direction * connection.arc_height
    path = f"M{start:g} {base}C{start:g} {peak} {end:g} {peak} {end:g} {base + direction * 7}"
    head = f"{end:g},{base} {end - 4:g},{base + direction * 8} {end + 4:g},{base + direction * 8}"
    label_y = base + direction * 0.75 * connection.arc_height + (-5 if connection.is_skip else 14)
    return path, head, (start + end) / 2, label_y
