"""Run the blocks of pages and write what they print into the pages: ``python -m tools.docs.outputs [--not-run] [PAGE ...]``.

Outputs that differ only in times, digests and the like stay as they are.
"""

import argparse
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.docs.normalize import is_same_output
from tools.docs.page import ROOT, Block, documented_pages, read_blocks, read_commands
from tools.docs.session import Session, copy_tree


def main() -> None:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="relative to the root of the tree; all of them by default")
    parser.add_argument("--not-run", action="store_true", help="also run the blocks that tests do not run")
    parser.add_argument("--all", action="store_true", help="also write outputs that differ only in times and the like")
    options = parser.parse_args()
    for page in options.pages or documented_pages():
        with tempfile.TemporaryDirectory() as folder:
            changed = rewrite(page, Path(folder), not_run=options.not_run, every=options.all)
        print(f"{page}: {changed} outputs written", flush=True)


def rewrite(page: Path, folder: Path, *, not_run: bool, every: bool) -> int:
    """Write the outputs of one page; return how many changed."""
    path = ROOT / page
    if page.name == "CONTRIBUTING.md":
        copy_tree(folder)
    session = Session(folder, fresh=True)
    text = path.read_text()
    blocks = read_blocks(path)
    edits: list[tuple[int, int, str]] = []
    try:
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if block.not_run and not not_run:
                continue
            outputs = session.run(block)
            edits += _edits(text, block, following, outputs, every=every)
    finally:
        session.close()
    for start, end, replacement in reversed(edits):
        text = text[:start] + replacement + text[end:]
    path.write_text(text)
    return len(edits)


def _edits(
    text: str, block: Block, following: Block | None, outputs: list[str], *, every: bool
) -> list[tuple[int, int, str]]:
    """The changes of the page's text: first character, end, and what comes there."""
    if block.kind == "python":
        stated = following.source if following is not None and following.kind == "output" else ""
        if is_same_output(stated, outputs[0]) and not (every and stated):
            return []
        if following is None or following.kind != "output":
            sys.exit(f'line {block.line}: the block prints, but no block `text title="Output"` follows:\n{outputs[0]}')
        return [_with_source(text, following, outputs[0])]
    if block.kind != "console":
        return []
    commands = list(read_commands(block.source))
    same = [is_same_output(command.output, output) for command, output in zip(commands, outputs, strict=True)]
    if all(same) and not every:
        return []
    parts = []
    for command, output, unchanged in zip(commands, outputs, same, strict=True):
        shown = command.output if unchanged and not (every and "..." not in command.output) else output
        parts.append("\n".join(filter(None, [f"$ {command.text}", shown.strip("\n")])))
    spacing = (
        "\n\n"
        if any(command.output or output.strip() for command, output in zip(commands, outputs, strict=True))
        else "\n"
    )
    return [_with_source(text, block, spacing.join(parts))]


def _with_source(text: str, block: Block, source: str) -> tuple[int, int, str]:
    """The change that gives a block another content."""
    opening, *_, closing = text[block.start : block.end].split("\n")
    indent = opening[: len(opening) - len(opening.lstrip())]
    lines = "\n".join(line.rstrip() for line in source.strip("\n").splitlines())
    return block.start, block.end, f"{opening}\n{textwrap.indent(lines, indent)}\n{closing}"


if __name__ == "__main__":
    main()
