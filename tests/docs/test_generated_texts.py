"""The parts of pages that are generated from the code are those that would be generated now."""

import re
from pathlib import Path

import pytest

from tools.docs.generated_texts import TEXT_FUNCTIONS, updated_pages
from tools.docs.page import ROOT

PAGES = list(updated_pages())


@pytest.mark.parametrize(
    ("path", "text", "updated_text"), PAGES, ids=[str(path.relative_to(ROOT)) for path, _, _ in PAGES]
)
def test_generated_parts_are_current(path: Path, text: str, updated_text: str) -> None:
    assert text == updated_text, "run: python -m tools.docs.generated_texts"


def test_every_text_is_in_a_page_once() -> None:
    names = [name for _, text, _ in PAGES for name in re.findall("<!-- generated: (.+) -->", text)]
    assert sorted(names) == sorted(TEXT_FUNCTIONS)
    assert names == [name for _, text, _ in PAGES for name in re.findall("<!-- end of (.+) -->", text)]
