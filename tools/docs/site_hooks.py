"""What `mkdocs build` does beside rendering docs/: pages from other folders, links between them, tables of benchmarks and errors.

A hook of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks): it calls the functions ``on_*``.
"""

import functools
import importlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs.benchmark_page import benchmark_tables
from tools.docs.error_page import error_reference, rule_reference
from tools.docs.option_page import option_reference
from tools.docs.source_tree import source_tree

ROOT = Path(__file__).parents[2]
# Pages of the site that are files of the tree outside docs/.
INCLUDED = {
    "CHANGELOG.md": "development/changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "examples/README.md": "how-to/examples.md",
    "loaders/README.md": "how-to/write-a-loader.md",
    "schema/CHANGES.md": "reference/format-changes.md",
    "schema/COMPATIBILITY.md": "reference/format-compatibility.md",
    "schema/SPEC.md": "reference/spec.md",
    "schema/vectors/README.md": "reference/vectors.md",
}
_SOURCES = {page: source for source, page in INCLUDED.items()}
# Lines of pages that are replaced by what the function returns.
_GENERATED = {
    "<!-- benchmarks -->": benchmark_tables,
    "<!-- errors -->": error_reference,
    "<!-- rules -->": rule_reference,
    "<!-- options: serve -->": functools.partial(option_reference, "serve"),
    "<!-- tree -->": source_tree,
}
_LINK = re.compile(r"(?P<mark>!?)\[(?P<label>[^\[\]]*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the included pages; leave out the data of benchmarks."""
    for source, page in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for file in list(files):
        if file.src_uri.startswith("benchmarks/"):
            files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in what is generated, and let links lead to pages of the site."""
    for mark, function in _GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, function())
    if page.file.src_uri == INCLUDED["schema/SPEC.md"]:
        markdown = re.sub(r"^```(\w+) ([\w.-]+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
        markdown = re.sub(r"^\*\*([A-Z]\d+)\*\*", r"**\1**{ #\1 }", markdown, flags=re.MULTILINE)
    fences = [match.span() for match in _FENCE.finditer(markdown)]

    def replaced(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in fences):
            return match[0]
        return _site_link(match, page.file.src_uri)

    return _LINK.sub(replaced, markdown)


def _site_link(match: re.Match[str], page: str) -> str:
    """A link of a page as a link of the site; its label alone where the target is not in the site."""
    target = match["target"]
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    source = PurePosixPath(_SOURCES.get(page, f"docs/{page}"))
    path = os.path.normpath(source.parent / target)
    found = INCLUDED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if found is None:
        return f"`{match['label'].strip('`')}`"
    relative = os.path.relpath(found, PurePosixPath(page).parent)
    return f"{match['mark']}[{match['label']}]({relative}{match['anchor'] or ''})"


def on_pre_build(**_: Any) -> None:
    """Fail early where the package that is documented is another one than this tree."""
    package = Path(importlib.import_module("stagepack").__file__ or "")
    if not package.is_relative_to(ROOT):
        raise SystemExit(f"stagepack is imported from {package.parent}, not from {ROOT}")
