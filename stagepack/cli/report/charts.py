"""Bars and columns as SVG elements. Lengths are in pixels.

- Elements of an HTML page.
- A drawing of when processes worked on which request, as an SVG element. Lengths are in pixels, times in nanoseconds.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

from stagepack.cli.output import format_time, printable

Child = str | Element
_CHART_HEIGHT, _CHART_STEP = 120, 20
_WIDTH = 1140
_LABEL_HEIGHT, _ROW_HEIGHT, _STRIP_HEIGHT, _ROW_GAP = 18, 26, 5, 10
_AXIS_HEIGHT = 26
_LEAST_WIDTH = 0.5  # of a bar, so that a short one is seen
_DIGIT_WIDTH = 9
_REQUEST_COLORS = 4
_MOST_TICKS = 10
_PICOSECONDS = 1000  # in a nanosecond


def html_element(tag: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Return an element with text and elements in it.

    In the names of attributes ``_`` is written as ``-``, and a trailing ``_`` is dropped: ``class_`` is `class`.
    """
    parent = Element(
        tag, {key.rstrip("_").replace("_", "-"): _attribute_text(value) for key, value in attributes.items()}
    )
    for child_or_children in children:
        for child in [child_or_children] if isinstance(child_or_children, str | Element) else child_or_children:
            _append(parent, child)
    return parent


def _append(parent: Element, child: Child) -> None:
    if isinstance(child, Element):
        parent.append(child)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + printable(child)
    else:
        parent.text = (parent.text or "") + printable(child)


def _attribute_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    width, height = 36 + _CHART_STEP * (len(shares) + 1), _CHART_HEIGHT + 34
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    return html_element(
        "svg", level_labels, columns, column_labels, class_="bubble", role="img", aria_label=title, **size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A time in which a process did one thing.

    Attributes:
        kind: what it did. Compute is drawn as a bar, the others as strips below it.
        request: the number of the request.
        title: what the pointer shows.
        start: its begin, from the begin of the drawing.
        duration: its duration.
    """

    kind: Literal["compute", "wait", "transfer"]
    request: int
    title: str
    start: float
    duration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A process.

    Attributes:
        label: its name and its busy share.
        bars: what it did.
    """

    label: str
    bars: Sequence[Bar]


def timeline_drawing(rows: Sequence[Row], duration: float, title: str) -> Element:
    """Return a drawing of rows over a common time."""
    has_strips = any(bar.kind != "compute" for row in rows for bar in row.bars)
    row_height = _ROW_HEIGHT + (2 * _STRIP_HEIGHT + 2 if has_strips else 0)
    step = _LABEL_HEIGHT + row_height + _ROW_GAP
    height = len(rows) * step + _AXIS_HEIGHT
    return html_element(
        "svg",
        _axis(duration, len(rows) * step),
        [element for index, row in enumerate(rows) for element in _row(row, index * step, duration, row_height)],
        class_="timeline",
        role="img",
        aria_label=title,
        width=_WIDTH,
        height=height,
    )


def _row(row: Row, top: float, duration: float, row_height: float) -> Iterator[Element]:
    yield html_element("text", row.label, x=0, y=top + 13)
    bars_top = top + _LABEL_HEIGHT
    yield html_element("rect", x=0, y=bars_top, width=_WIDTH, height=row_height, class_="ground")
    scale = _WIDTH / duration
    strip_tops = {
        "transfer": bars_top + _ROW_HEIGHT + 1,
        "wait": bars_top + _ROW_HEIGHT + _STRIP_HEIGHT + 2,
    }
    for bar in row.bars:
        left, width = bar.start * scale, max(bar.duration * scale, _LEAST_WIDTH)
        is_compute = bar.kind == "compute"
        bar_top = bars_top if is_compute else strip_tops[bar.kind]
        yield html_element(
            "rect",
            html_element("title", bar.title),
            x=round(left, 2),
            y=bar_top,
            width=round(width, 2),
            height=_ROW_HEIGHT if is_compute else _STRIP_HEIGHT,
            class_=f"request{bar.request % _REQUEST_COLORS}" if is_compute else bar.kind,
        )
        request_label = str(bar.request)
        if is_compute and width > _DIGIT_WIDTH * (len(request_label) + 1):
            middle = round(left + width / 2, 2)
            yield html_element("text", request_label, x=middle, y=bar_top + 17, text_anchor="middle", class_="request")


def _axis(duration: float, top: float) -> Iterator[Element]:
    """Lines at round times, with labels below."""
    step = _tick_step(duration)
    for tick in range(int(duration / step) + 1):
        left = round(tick * step / duration * _WIDTH, 2)
        yield html_element("line", x1=left, x2=left, y1=0, y2=top + 4, class_="tick")
        anchor = "start" if tick == 0 else "middle" if left < _WIDTH - 24 else "end"
        label = "0" if tick == 0 else format_time(tick * step * _PICOSECONDS)
        yield html_element("text", label, x=left, y=top + 18, text_anchor=anchor, class_="soft")


def _tick_step(duration: float) -> float:
    """A round time, so that there are at most ten ticks."""
    least_step = duration / _MOST_TICKS
    magnitude = 10.0 ** math.floor(math.log10(least_step))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least_step)
