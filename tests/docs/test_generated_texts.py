"""The parts of pages that are generated from the code are those that would be generated now."""

import re
import subprocess
import sys

from tools.docs.generated_texts import TEXT_FUNCTIONS, updated_pages
from tools.docs.page import ROOT

# In a process of its own: other tests register runtimes and operators, which the texts would list.
STALE_PAGES = """
from tools.docs.generated_texts import updated_pages
print(*(path for path, text, updated_text in updated_pages() if text != updated_text))
"""


def test_generated_parts_are_current() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", STALE_PAGES], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert finished.stdout.split() == [], "run: python -m tools.docs.generated_texts"


def test_every_text_is_in_a_page_once() -> None:
    page_texts = [text for _, text, _ in updated_pages()]
    names = [name for text in page_texts for name in re.findall("<!-- generated: (.+) -->", text)]
    assert sorted(names) == sorted(TEXT_FUNCTIONS)
    assert names == [name for text in page_texts for name in re.findall("<!-- end of (.+) -->", text)]
