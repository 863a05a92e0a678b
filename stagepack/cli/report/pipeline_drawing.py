"""The drawing of a pipeline as SVG, once for each width of a screen."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from stagepack.cli.quantities import format_bytes, format_time
from stagepack.cli.report.html_element import html_element
from stagepack.cli.report.pipeline_layout import (
    BOX_HEIGHT,
    BOX_WIDTH,
    Label,
    Line,
    PipelineLayout,
    Point,
    column_counts,
    pipeline_layout,
)

# The style sheet shows one of them. Their rows have at most so many boxes.
_MOST_COLUMNS = {"narrow": 2, "medium": 4, "wide": 7}
_LARGEST_SCALE = 1.25  # of a drawing that is smaller than the page
_NAME_CHARACTERS, _END_CHARACTERS = 16, 15  # that fit into the box of a stage, and of the input
_BAR_LEFT, _BAR_HEIGHT = 8, 4
_BUTTONS = {"in": "Zoom in", "out": "Zoom out", "whole": "Whole picture", "full": "Full screen"}


def pipeline_picture(cut_facts: Mapping[str, Any]) -> Element:
    """Return the drawings of a pipeline for all widths, with buttons that the script of the page shows."""
    size_classes: dict[int, list[str]] = {}
    for size_class, most_columns in _MOST_COLUMNS.items():
        size_classes.setdefault(column_counts(len(cut_facts["stages"]), most_columns), []).append(size_class)
    drawings = [
        pipeline_drawing(cut_facts, pipeline_layout(cut_facts, columns), " ".join(classes))
        for columns, classes in size_classes.items()
    ]
    buttons = [
        html_element("button", button_text, type="button", data_zoom=zoom) for zoom, button_text in _BUTTONS.items()
    ]
    return html_element(
        "div",
        html_element("div", buttons, class_="zoom", hidden="hidden"),
        *drawings,
        class_="picture",
        role="group",
        aria_label="picture of the pipeline",
    )


def pipeline_drawing(cut_facts: Mapping[str, Any], layout: PipelineLayout, class_: str) -> Element:
    """Return one drawing of a pipeline."""
    slowest = max((stage["picoseconds"] for stage in cut_facts["stages"]), default=0) or 1
    edges, boxes = cut_facts["edges"], layout.boxes
    return html_element(
        "svg",
        [element for line in layout.lines for element in _line(line)],
        _end_box("input", [edge["name"] for edge in edges if edge["producer"] is None], boxes[0]),
        [_stage_box(stage, box, slowest) for stage, box in zip(cut_facts["stages"], boxes[1:-1], strict=True)],
        _end_box("result", [edge["name"] for edge in edges if edge["result"]], boxes[-1]),
        [_label(label) for label in layout.labels],
        class_=class_,
        role="img",
        aria_label="the stages and the values that cross between them",
        viewBox=f"0 0 {layout.width:g} {layout.height:g}",
        width=round(layout.width * _LARGEST_SCALE),
        height=round(layout.height * _LARGEST_SCALE),
    )


def shortened_path(path: str, character_count: int) -> str:
    """Return the path of a module in so many characters: its end, with its last number, which tells the layer."""
    if len(path) <= character_count:
        return path
    names = path.split(".")
    layer = max((index for index, name in enumerate(names) if name.isdigit()), default=0)
    if layer == 0:
        return f"…{path[1 - character_count :]}"
    # An end of more names than characters does not fit.
    for first in range(max(1, len(names) - character_count), layer + 1):
        end = ".".join(names[first:])
        if len(end) < character_count:
            return f"…{end}"
    return f"…{shortened('.'.join(names[layer:]), character_count - 1)}"


def shortened(text: str, character_count: int) -> str:
    """Return a text in so many characters: its start."""
    return text if len(text) <= character_count else f"{text[: character_count - 1]}…"


def _line(line: Line) -> Iterator[Element]:
    first, *others = line.points
    path = f"M{first.x:g} {first.y:g}" + "".join(f"L{point.x:g} {point.y:g}" for point in others)
    yield html_element("path", html_element("title", line.title), d=path, class_=f"line {line.kind}")
    if line.has_dot:
        yield html_element("circle", cx=first.x, cy=first.y, r=2.5, class_=f"head {line.kind}")
    if line.has_head:
        yield html_element("polygon", points=_head_points(line.points), class_=f"head {line.kind}")


def _head_points(points: Sequence[Point]) -> str:
    """The corners of an arrow head at the end of a line, which points right or down."""
    (before_x, _), (x, y) = points[-2:]
    is_down = before_x == x
    corners = [(x, y), *([(x - 3.5, y - 8), (x + 3.5, y - 8)] if is_down else [(x - 8, y - 4), (x - 8, y + 4)])]
    return " ".join(f"{corner_x:g},{corner_y:g}" for corner_x, corner_y in corners)


def _label(label: Label) -> Element:
    return html_element(
        "text",
        label.text,
        x=label.x,
        y=label.baseline,
        text_anchor=label.anchor,
        class_=f"label {label.kind}",
    )


def _stage_box(stage: Mapping[str, Any], corner: Point, slowest: int) -> Element:
    module = stage["starts_at"] or "the model"
    weights, time = format_bytes(stage["weight_bytes"]), format_time(stage["picoseconds"])
    name = f"stage {stage['stage']}"
    center = corner.x + BOX_WIDTH / 2
    bar_width = BOX_WIDTH - 2 * _BAR_LEFT
    bar_place = {
        "x": corner.x + _BAR_LEFT,
        "y": corner.y + BOX_HEIGHT - _BAR_LEFT - _BAR_HEIGHT / 2,
        "height": _BAR_HEIGHT,
    }
    return html_element(
        "g",
        html_element("title", f"{name}: starts at {module}, {weights} of weights, {time}"),
        html_element("rect", x=corner.x, y=corner.y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=6, class_="box"),
        html_element("text", name, x=center, y=corner.y + 19, class_="name"),
        html_element("text", shortened_path(module, _NAME_CHARACTERS), x=center, y=corner.y + 34, class_="module"),
        html_element("text", f"{weights}, {time}", x=center, y=corner.y + 49, class_="costs"),
        html_element("rect", width=bar_width, **bar_place, class_="track"),
        html_element("rect", width=round(bar_width * stage["picoseconds"] / slowest, 1), **bar_place, class_="time"),
    )


def _end_box(name: str, value_names: Sequence[str], corner: Point) -> Element:
    """The input or the result."""
    center = corner.x + BOX_WIDTH / 2
    names = ", ".join(value_names)
    return html_element(
        "g",
        html_element("title", f"{name}: {names}"),
        html_element("rect", x=corner.x, y=corner.y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=24, class_="end"),
        html_element("text", name, x=center, y=corner.y + 29, class_="name"),
        html_element("text", shortened(names, _END_CHARACTERS), x=center, y=corner.y + 45, class_="module"),
    )
