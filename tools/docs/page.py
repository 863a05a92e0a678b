"""The code blocks of a Markdown page, found by Sybil (https://sybil.readthedocs.io), and what each of them is for.

| fence | meaning |
|---|---|
| ``` ```python ``` | code that runs; a following ``` ```text title="Output" ``` is what it prints |
| ``` ```console ``` | commands, each behind ``$ ``, and what they print |
| ``` ```LANGUAGE title="FILE" ``` | a file of the page's working folder |
| ``` ```diff ``` | a patch for files of the working folder |
| ``` ```yaml ```, ``` ```json ``` | data that must parse |
| ``` ```text ``` | shown only |

A line ``<!-- not run: REASON -->`` above a block says that tests do not run it. When the reason begins with "slow",
`tools/docs/outputs.py --slow` runs it. A line ``<!-- slow: REASON -->`` says that `make test-zoo` alone runs the block, which only
blocks with such a line may need; the reason names the test that stays in `make test`. A line ``<!-- needs: MODULES -->`` says the same as
``not run`` where one of these modules, separated by commas, is not installed: `make test-libraries` runs the block. A line
``<!-- fails: REASON -->`` above a block says that a failure in its output is wanted; see `tools/docs/compared_outputs.py`.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sybil.document import Document
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
BlockKind = Literal["python", "output", "console", "file", "diff", "data", "shown", "unknown"]
_INFO_PATTERN = re.compile(r'[ ]*(?P<language>[\w-]*)(?: title="(?P<title>[^"\n]*)")?[^\n]*\n')
_DATA_LANGUAGES = frozenset({"yaml", "json"})
_SHOWN_LANGUAGES = frozenset({"text", "mermaid", "hex"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block.

    Attributes:
        line: the line of its opening fence, from 1.
        start, end: the characters of the page that it is, `end` excluded.
        language: of the fence, such as ``python``.
        title: of the fence; the name of the file for the kind ``file``.
        source: the content, without the indentation of the fence.
        kind: what it is for.
        not_run: why tests do not run it; empty when they do.
        slow: why only `make test-zoo` runs it; empty when `make test` does.
        fails: why its output shows a failure; empty when none is wanted.
    """

    line: int
    start: int
    end: int
    language: str
    title: str
    source: str
    kind: BlockKind
    not_run: str
    slow: str
    fails: str


def documented_pages() -> list[Path]:
    """The Markdown pages whose blocks are run, relative to the root of the tree."""
    pages_outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
    return sorted(
        page_path.relative_to(ROOT)
        for page_path in (*pages_outside, *(ROOT / "docs").rglob("*.md"))
        if page_path.exists()
    )


def changes_the_tree(page_path: Path) -> bool:
    """Whether the blocks of a page, relative to the root, change files of the tree: they run in a copy of the tree."""
    return page_path.parts[:2] == ("docs", "contributing")


def read_blocks(page_path: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    sybil_document = Document(page_path.read_text(), str(page_path))
    reasons_not_run = _directive_reasons("not run", sybil_document)
    needed_modules = _directive_reasons("needs", sybil_document)
    slow_reasons = _directive_reasons("slow", sybil_document)
    reasons_to_fail = _directive_reasons("fails", sybil_document)
    page_blocks: list[Block] = []
    for region in sorted(RawFencedCodeBlockLexer(_INFO_PATTERN)(sybil_document), key=lambda region: region.start):
        fence_language, fence_title = region.lexemes["language"], region.lexemes["title"] or ""
        page_blocks.append(
            Block(
                line=sybil_document.text.count("\n", 0, region.start) + 1,
                start=region.start,
                end=region.end,
                language=fence_language,
                title=fence_title,
                source=str(region.lexemes["source"]),
                kind=_block_kind(fence_language, fence_title, page_blocks),
                not_run=_reason_above(region.start, reasons_not_run, sybil_document)
                or _missing_modules(_reason_above(region.start, needed_modules, sybil_document)),
                slow=_reason_above(region.start, slow_reasons, sybil_document),
                fails=_reason_above(region.start, reasons_to_fail, sybil_document),
            )
        )
    return page_blocks


def _missing_modules(needed_modules: str) -> str:
    """Why a block that needs modules is not run; empty when all of them are installed."""
    missing = [
        module
        for name in needed_modules.split(",")
        if (module := name.strip()) and not importlib.util.find_spec(module)
    ]
    return f"needs {', '.join(missing)}, which `make test-libraries` installs" if missing else ""


def _directive_reasons(directive: str, sybil_document: Document) -> dict[int, str]:
    """The reasons of the comments ``<!-- DIRECTIVE: REASON -->`` of a page, by the position where each ends."""
    find_directives = DirectiveInHTMLCommentLexer(directive=directive, arguments=".+?")
    return {region.end: region.lexemes["arguments"].strip() for region in find_directives(sybil_document)}


def _reason_above(block_start: int, reason_by_end: dict[int, str], sybil_document: Document) -> str:
    """The reason of the comment directly above a block; empty when there is none."""
    for reason_end, reason in reason_by_end.items():
        if reason_end <= block_start and not sybil_document.text[reason_end:block_start].strip(" \n->"):
            return reason
    return ""


def _block_kind(fence_language: str, fence_title: str, earlier_blocks: list[Block]) -> BlockKind:
    """What a block is for."""
    if fence_language == "text" and fence_title == "Output":
        return "output" if earlier_blocks and earlier_blocks[-1].kind == "python" else "shown"
    if fence_title:
        return "file"
    if fence_language in ("python", "console", "diff"):
        return fence_language  # type: ignore[return-value]
    if fence_language in _DATA_LANGUAGES:
        return "data"
    return "shown" if fence_language in _SHOWN_LANGUAGES else "unknown"


@dataclass(frozen=True, slots=True)
class BlockCommand:
    """A command of a console block, and what the page says that it prints."""

    command_text: str
    stated_output: str


def read_commands(block_source: str) -> Iterator[BlockCommand]:
    """Yield the commands of a console block; a command that ends with a backslash goes on in the next line."""
    command_lines: list[str] = []
    output_lines: list[str] = []
    for source_line in block_source.splitlines():
        if command_lines and command_lines[-1].endswith("\\") and not output_lines:
            command_lines.append(source_line)
        elif source_line.startswith("$ "):
            if command_lines:
                yield BlockCommand("\n".join(command_lines), "\n".join(output_lines).strip("\n"))
            command_lines, output_lines = [source_line[2:]], []
        else:
            output_lines.append(source_line)
    if command_lines:
        yield BlockCommand("\n".join(command_lines), "\n".join(output_lines).strip("\n"))


def stated_outputs(block: Block, next_block: Block | None) -> list[str]:
    """The outputs that a page states for a block: one for each command, one for Python code, none for other kinds."""
    if block.kind == "python":
        return [next_block.source if next_block is not None and next_block.kind == "output" else ""]
    if block.kind == "console":
        return [block_command.stated_output for block_command in read_commands(block.source)]
    return []
