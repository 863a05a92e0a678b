"""The parts of pages that are generated from the code: ``python -m tools.docs.generated_texts [--check]`` writes or compares them.

Such a part is in the page, between the lines ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.docs.benchmark_page import benchmark_tables
from tools.docs.import_contracts import contract_list
from tools.docs.references import command_reference, coverage_figures, error_reference, option_reference, rule_reference

ROOT = Path(__file__).parents[2]
TEXT_FUNCTIONS: dict[str, Callable[[], str]] = {
    "benchmarks": benchmark_tables,
    "commands": command_reference,
    "contracts": contract_list,
    "coverage": coverage_figures,
    "errors": error_reference,
    "options of serve": functools.partial(option_reference, "serve"),
    "rules": rule_reference,
}
_GENERATED_PATTERN = re.compile(
    r"(?P<start><!-- generated: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end of (?P=name) -->\n)", re.DOTALL
)


def updated_pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with generated parts: its path, its text, and the text with these parts generated anew."""
    for page_path in sorted((ROOT / "docs").rglob("*.md")):
        page_text = page_path.read_text()
        updated_text = _GENERATED_PATTERN.sub(
            lambda match: f"{match['start']}\n{TEXT_FUNCTIONS[match['name']]()}\n\n{match['end']}", page_text
        )
        if "<!-- generated: " in page_text:
            yield page_path, page_text, updated_text


def main() -> None:
    """Write the pages, or compare them with what would be written."""
    argument_parser = argparse.ArgumentParser(description=__doc__)
    argument_parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a page is not the current one"
    )
    is_check = argument_parser.parse_args().check
    for page_path, page_text, updated_text in updated_pages():
        if is_check and page_text != updated_text:
            sys.exit(f"{page_path.relative_to(ROOT)} is not current: run python -m tools.docs.generated_texts")
        page_path.write_text(updated_text)


if __name__ == "__main__":
    main()
