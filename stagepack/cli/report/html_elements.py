"""Elements of an HTML page: text, tables, bars and columns. Lengths are in pixels."""

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from stagepack.cli.output import printable

Child = str | Element
_CHART_HEIGHT, _CHART_STEP = 120, 20


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


def scrollable(content: Element) -> Element:
    """Return an element in a box that scrolls by itself where the screen is too narrow."""
    return html_element("div", content, class_="wide")


def data_table(column_names: Sequence[str], rows: Sequence[Sequence[Element]]) -> Element:
    """Return a table; a column whose name starts with '#' is aligned to the right.

    On a narrow screen each row is shown as a block, in which each cell has the name of its column.
    """
    heads = [
        html_element(
            "th", column_name.lstrip("#"), scope="col", **({"class_": "number"} if column_name.startswith("#") else {})
        )
        for column_name in column_names
    ]
    for row in rows:
        for column_name, cell in zip(column_names, row, strict=True):
            cell.set("data-label", column_name.lstrip("#"))
    return html_element(
        "table",
        html_element("thead", html_element("tr", heads)),
        html_element("tbody", [html_element("tr", row) for row in rows]),
    )


def number_cell(content: str) -> Element:
    """Return a cell that is aligned to the right."""
    return html_element("td", content, class_="number")


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
