"""The code blocks of a Markdown page, found by Sybil (https://sybil.readthedocs.io), and what each of them is for.

| fence | meaning |
|---|---|
| ``` ```python ``` | code that runs; a following ``` ```text title="Output" ``` is what it prints |
| ``` ```console ``` | commands, each behind ``$ ``, and what they print |
| ``` ```LANGUAGE title="FILE" ``` | a file of the page's working folder |
| ``` ```diff ``` | a patch for files of the working folder |
| ``` ```yaml ```, ``` ```json ``` | data that must parse |
| ``` ```text ``` | shown only |

A line ``<!-- not run: REASON -->`` above a block says that tests do not run it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sybil.document import Document
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
Kind = Literal["python", "output", "console", "file", "diff", "data", "shown", "unknown"]
_INFO = re.compile(r'[ ]*(?P<language>[\w-]*)(?: title="(?P<title>[^"\n]*)")?[^\n]*\n')
_DATA = frozenset({"yaml", "json"})
_SHOWN = frozenset({"text", "mermaid", "hex"})


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
    """

    line: int
    start: int
    end: int
    language: str
    title: str
    source: str
    kind: Kind
    not_run: str


def documented_pages() -> list[Path]:
    """The Markdown pages whose blocks are run, relative to the root of the tree."""
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
    return sorted(page.relative_to(ROOT) for page in (*others, *(ROOT / "docs").rglob("*.md")) if page.exists())


def read_blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    document = Document(page.read_text(), str(page))
    reasons = {
        region.end: region.lexemes["arguments"].strip()
        for region in DirectiveInHTMLCommentLexer(directive="not run", arguments=".+?")(document)
    }
    blocks: list[Block] = []
    for region in sorted(RawFencedCodeBlockLexer(_INFO)(document), key=lambda region: region.start):
        before = [
            end for end in reasons if end <= region.start and not document.text[end : region.start].strip(" \n->")
        ]
        language, title = region.lexemes["language"], region.lexemes["title"] or ""
        blocks.append(
            Block(
                line=document.text.count("\n", 0, region.start) + 1,
                start=region.start,
                end=region.end,
                language=language,
                title=title,
                source=str(region.lexemes["source"]),
                kind=_kind(language, title, blocks),
                not_run=reasons[before[-1]] if before else "",
            )
        )
    return blocks


def _kind(language: str, title: str, before: list[Block]) -> Kind:
    """What a block is for."""
    if language == "text" and title == "Output":
        return "output" if before and before[-1].kind == "python" else "shown"
    if title:
        return "file"
    if language in ("python", "console", "diff"):
        return language  # type: ignore[return-value]
    if language in _DATA:
        return "data"
    return "shown" if language in _SHOWN else "unknown"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and what the page says that it prints."""

    text: str
    output: str


def read_commands(source: str) -> Iterator[Command]:
    """Yield the commands of a console block; a command that ends with a backslash goes on in the next line."""
    command: list[str] = []
    output: list[str] = []
    for line in source.splitlines():
        if command and command[-1].endswith("\\") and not output:
            command.append(line)
        elif line.startswith("$ "):
            if command:
                yield Command("\n".join(command), "\n".join(output).strip("\n"))
            command, output = [line[2:]], []
        else:
            output.append(line)
    if command:
        yield Command("\n".join(command), "\n".join(output).strip("\n"))
