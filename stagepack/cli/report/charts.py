"""Bars and columns as SVG elements. Lengths are in pixels."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from stagepack.cli.report.html_element import html_element

_CHART_HEIGHT, _CHART_STEP = 120, 20


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
