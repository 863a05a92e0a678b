"""Run the blocks of pages and write what they print into the pages: ``python -m tools.docs.outputs [--slow] [PAGE ...]``.

Outputs that differ only in times, digests and the like stay as they are.
"""

import argparse
import itertools
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.docs.normalize import is_same_output
from tools.docs.page import ROOT, Block, documented_pages, read_blocks, read_commands
from tools.docs.session import Session, copy_tree


def main() -> None:
    """Rewrite the pages."""
    argument_parser = argparse.ArgumentParser(description=__doc__)
    argument_parser.add_argument(
        "pages", nargs="*", type=Path, help="relative to the root of the tree; all of them by default"
    )
    argument_parser.add_argument("--slow", action="store_true", help="also run the blocks that tests do not run")
    argument_parser.add_argument(
        "--all", action="store_true", help="also write outputs that differ only in times and the like"
    )
    options = argument_parser.parse_args()
    for page_path in options.pages or documented_pages():
        with tempfile.TemporaryDirectory() as work_folder:
            output_count = rewrite_page(page_path, Path(work_folder), run_slow=options.slow, rewrite_all=options.all)
        print(f"{page_path}: {output_count} outputs written", flush=True)


def rewrite_page(page_path: Path, work_folder: Path, *, run_slow: bool, rewrite_all: bool) -> int:
    """Write the outputs of one page; return how many changed."""
    full_path = ROOT / page_path
    if page_path.name == "CONTRIBUTING.md":
        copy_tree(work_folder)
    session = Session(work_folder, is_fresh=True)
    page_text = full_path.read_text()
    page_blocks = read_blocks(full_path)
    text_edits: list[tuple[int, int, str]] = []
    try:
        for block, next_block in itertools.zip_longest(page_blocks, page_blocks[1:]):
            if block.not_run and not (run_slow and block.not_run.startswith("slow")):
                continue
            block_outputs = session.run(block)
            text_edits += _block_edits(page_text, block, next_block, block_outputs, rewrite_all=rewrite_all)
    finally:
        session.close()
    for edit_start, edit_end, replacement in reversed(text_edits):
        page_text = page_text[:edit_start] + replacement + page_text[edit_end:]
    full_path.write_text(page_text)
    return len(text_edits)


def _block_edits(
    page_text: str, block: Block, next_block: Block | None, block_outputs: list[str], *, rewrite_all: bool
) -> list[tuple[int, int, str]]:
    """The changes of the page's text: first character, end, and what comes there."""
    if block.kind == "python":
        stated_output = next_block.source if next_block is not None and next_block.kind == "output" else ""
        if is_same_output(stated_output, block_outputs[0]) and not (rewrite_all and stated_output):
            return []
        if next_block is None or next_block.kind != "output":
            sys.exit(
                f'line {block.line}: the block prints, but no block `text title="Output"` follows:\n{block_outputs[0]}'
            )
        return [_with_source(page_text, next_block, block_outputs[0])]
    if block.kind != "console":
        return []
    block_commands = list(read_commands(block.source))
    same_flags = [
        is_same_output(block_command.stated_output, actual_output)
        for block_command, actual_output in zip(block_commands, block_outputs, strict=True)
    ]
    if all(same_flags) and not rewrite_all:
        return []
    command_texts = []
    for block_command, actual_output, is_same in zip(block_commands, block_outputs, same_flags, strict=True):
        shown_output = (
            block_command.stated_output
            if is_same and not (rewrite_all and "..." not in block_command.stated_output)
            else actual_output
        )
        command_texts.append("\n".join(filter(None, [f"$ {block_command.command_text}", shown_output.strip("\n")])))
    command_separator = (
        "\n\n"
        if any(
            block_command.stated_output or actual_output.strip()
            for block_command, actual_output in zip(block_commands, block_outputs, strict=True)
        )
        else "\n"
    )
    return [_with_source(page_text, block, command_separator.join(command_texts))]


def _with_source(page_text: str, block: Block, new_source: str) -> tuple[int, int, str]:
    """The change that gives a block another content."""
    opening_fence, *_, closing_fence = page_text[block.start : block.end].split("\n")
    fence_indent = opening_fence[: len(opening_fence) - len(opening_fence.lstrip())]
    stripped_lines = "\n".join(source_line.rstrip() for source_line in new_source.strip("\n").splitlines())
    return block.start, block.end, f"{opening_fence}\n{textwrap.indent(stripped_lines, fence_indent)}\n{closing_fence}"


if __name__ == "__main__":
    main()
