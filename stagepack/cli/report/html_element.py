"""Elements of an HTML page."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element

from stagepack.cli.output import printable

Child = str | Element


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
