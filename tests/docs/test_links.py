"""Links between pages lead to what a repository view shows: a file, and in it a heading or an anchor of this name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.docs.page import ROOT

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "schema/**/*.md", "examples/*.md", "loaders/*.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^()\s#]*)#([^()\s]+)\)")
_FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> Iterator[str]:
    """The names of headings as GitHub makes them, and those of anchors."""
    text = _FENCE.sub("", page.read_text())
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        yield slug if slug not in seen else f"{slug}-{seen[slug]}"
        seen[slug] = seen.get(slug, 0) + 1
    yield from re.findall(r"""<a (?:id|name)=["']([^"']+)["']""", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_to_a_part_of_a_page_has_an_anchor(page: Path) -> None:
    missing = [
        f"{target}#{anchor}"
        for target, anchor in _LINK.findall(_FENCE.sub("", page.read_text()))
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []
