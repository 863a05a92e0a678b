"""What the site is made of: links, diagrams, generated tables. `make docs` builds all of it, strictly."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from stagepack import errors
from stagepack.cli import main
from tests.conformance.vectors import all_rules
from tools.docs.benchmark_page import RESULTS_FOLDER, SECTION_TITLES, benchmark_tables
from tools.docs.page import ROOT, documented_pages
from tools.docs.references import command_reference, error_reference, option_reference, rule_reference, specified_rules

LINK_PATTERN = re.compile(r"\[[^\[\]]*\]\(([^()\s#]+)[^()\s]*\)")
ANCHOR_PATTERN = re.compile(r"\]\((?!https?:|mailto:)([^()\s#]*)#([^()\s]+)\)")
FENCE_PATTERN = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "schema/**/*.md", "examples/*.md", "loaders/*.md")
    for path in ROOT.glob(pattern)
)


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 6000


@pytest.mark.parametrize("page", documented_pages(), ids=str)
def test_links_lead_to_files_of_the_tree(page: Path) -> None:
    page_text = FENCE_PATTERN.sub("", (ROOT / page).read_text())
    link_targets = [link_target for link_target in LINK_PATTERN.findall(page_text) if "://" not in link_target]
    missing_targets = [link_target for link_target in link_targets if not (ROOT / page.parent / link_target).exists()]
    assert not missing_targets


def anchors(page: Path) -> Iterator[str]:
    """The names of headings as GitHub makes them, and those of anchors."""
    text = FENCE_PATTERN.sub("", page.read_text())
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
        for target, anchor in ANCHOR_PATTERN.findall(FENCE_PATTERN.sub("", page.read_text()))
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []


def test_the_diagrams_are_those_that_the_script_draws() -> None:
    command = [sys.executable, "-m", "tools.docs.diagrams", "--check"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_the_reference_has_every_error_and_every_rule() -> None:
    class_names = {
        class_name
        for class_name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert all(f"| `{class_name}` |" in error_reference() for class_name in class_names)
    assert [rule_number for rule_number, _ in specified_rules()] == list(all_rules())
    assert rule_reference().count("\n") == len(specified_rules()) + 1


def test_the_reference_of_the_server_has_every_option() -> None:
    from stagepack.cli.serve_command import command

    table = option_reference("serve")
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert all(re.search(rf"`{flag}[ `]", table) for option in options for flag in option.opts)
    assert "| `--max-batch N` | `32` |" in table


def test_every_defence_of_the_server_has_a_test() -> None:
    section = (
        (ROOT / "docs/reference/server.md")
        .read_text()
        .partition("## Security\n")[2]
        .partition("What the server does not do")[0]
    )
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        file_name = ""
        named_tests = re.findall(r"`((?:test_\w+\.py)?(?:::)?(?:test_\w+)?)`", row[4])
        assert named_tests, row[1]
        for named_test in named_tests:
            found_file, _, test_name = named_test.rpartition("::") if "::" in named_test else ("", "", named_test)
            if named_test.endswith(".py"):
                found_file, test_name = named_test, ""
            file_name = found_file or file_name
            [path] = (path for folder in ("serve", "text") for path in (ROOT / "tests" / folder).glob(file_name))
            assert f"def {test_name}" in path.read_text(), named_test


def test_the_reference_has_every_command() -> None:
    reference = command_reference()
    assert all(f"\n## {command}\n" in reference for command in main.list_commands(click.Context(main)))
    assert "Sentinel" not in reference
    assert "\\b" not in reference
    assert "\b" not in reference


def test_every_benchmark_has_results() -> None:
    tables = benchmark_tables()
    assert all(f"## {title}" in tables for title in SECTION_TITLES.values())
    assert {path.stem.partition("-")[0] for path in RESULTS_FOLDER.glob("*.json")} == SECTION_TITLES.keys()
    # The tables of benchmarks whose question is answered stay.
    assert {path.stem.removeprefix("bench_") for path in (ROOT / "tools").glob("bench_*.py")} <= SECTION_TITLES.keys()
