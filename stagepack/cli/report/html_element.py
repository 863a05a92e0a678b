"""Elements of a page."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element

from stagepack.cli.output import printable

Child = str | Element


def element(tag: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """An element with text and elements in it. ``class_`` stands for `class`, and other ``_`` in names of attributes for ``-``."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    for child in children:
        for part in [child] if isinstance(child, str | Element) else child:
            if isinstance(part, Element):
                made.append(part)
            elif len(made):
                made[-1].tail = (made[-1].tail or "") + printable(part)
            else:
                made.text = (made.text or "") + printable(part)
    return made


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
