"""What `mkdocs build` does beside rendering docs/: pages from other folders, and links between them.

A hook of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks): it calls the functions ``on_*``.
"""

import importlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TREE_ROOT = Path(__file__).parents[2]
# Pages of the site that are files of the tree outside docs/.
INCLUDED_PAGES = {
    "CHANGELOG.md": "development/changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security.md",
    "examples/README.md": "how-to/examples.md",
    "loaders/README.md": "how-to/write-a-loader.md",
    "schema/CHANGES.md": "reference/format-changes.md",
    "schema/COMPATIBILITY.md": "reference/format-compatibility.md",
    "schema/SPEC.md": "reference/spec.md",
    "schema/vectors/README.md": "reference/vectors.md",
}
_SOURCE_OF_PAGE = {page: source for source, page in INCLUDED_PAGES.items()}
_LINK_PATTERN = re.compile(r"(?P<mark>!?)\[(?P<label>[^\[\]]*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_FENCE_PATTERN = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the included pages; leave out the data of benchmarks."""
    for source_path, page_uri in INCLUDED_PAGES.items():
        files.append(File.generated(config, page_uri, content=(TREE_ROOT / source_path).read_text()))
    for file in list(files):
        if file.src_uri.startswith("benchmarks/"):
            files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to pages of the site."""
    if page.file.src_uri == "coverage.md":  # its tables need the width
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == INCLUDED_PAGES["schema/SPEC.md"]:
        markdown = re.sub(r"^```(\w+) ([\w.-]+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
        markdown = re.sub(r'^\*\*([A-Z]\d+)\*\*<a id="\1"></a>', r"**\1**{ #\1 }", markdown, flags=re.MULTILINE)
    fence_spans = [match.span() for match in _FENCE_PATTERN.finditer(markdown)]

    def replace_link(match: re.Match[str]) -> str:
        if any(fence_start <= match.start() < fence_end for fence_start, fence_end in fence_spans):
            return match[0]
        return _site_link(match, page.file.src_uri)

    return _LINK_PATTERN.sub(replace_link, markdown)


def _site_link(match: re.Match[str], page_uri: str) -> str:
    """A link of a page as a link of the site; its label alone where the target is not in the site."""
    link_target = match["target"]
    if "://" in link_target or link_target.startswith("mailto:"):
        return match[0]
    source_path = PurePosixPath(_SOURCE_OF_PAGE.get(page_uri, f"docs/{page_uri}"))
    tree_path = os.path.normpath(source_path.parent / link_target)
    site_uri = INCLUDED_PAGES.get(tree_path) or (
        tree_path.removeprefix("docs/") if tree_path.startswith("docs/") else None
    )
    if site_uri is None:
        return f"`{match['label'].strip('`')}`"
    relative_uri = os.path.relpath(site_uri, PurePosixPath(page_uri).parent)
    return f"{match['mark']}[{match['label']}]({relative_uri}{match['anchor'] or ''})"


def on_pre_build(**_: Any) -> None:
    """Fail early where the package that is documented is another one than this tree."""
    package_path = Path(importlib.import_module("stagepack").__file__ or "")
    if not package_path.is_relative_to(TREE_ROOT):
        raise SystemExit(f"stagepack is imported from {package_path.parent}, not from {TREE_ROOT}")


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Fail when a page loads something from another host."""
    for html_path in Path(config.site_dir).rglob("*.html"):
        if foreign := re.search(
            r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>", html_path.read_text()
        ):
            raise SystemExit(f"{html_path.relative_to(config.site_dir)} loads from another host: {foreign[0]}")
