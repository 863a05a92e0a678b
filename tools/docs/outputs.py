"""Run the blocks of pages and write what they print into the pages: ``python -m tools.docs.outputs [--slow] [PAGE ...]``.

Outputs that differ only in times, digests and the like stay as they are. A page stays as it is, and the exit status is 1, when one of its
blocks fails in a way that the page does not state (see `tools/docs/compared_outputs.py`).
"""

import argparse
import itertools
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.docs.compared_outputs import find_unwanted_failure, has_same_digests, is_same_output, without_times
from tools.docs.page import ROOT, Block, changes_the_tree, documented_pages, read_blocks, read_commands, stated_outputs
from tools.docs.session import Session, copy_tree


class PageError(Exception):
    """A block of a page fails, or its output has no place in the page."""


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
    refused_pages = 0
    for page_path in options.pages or documented_pages():
        with tempfile.TemporaryDirectory() as work_folder:
            try:
                output_count = rewrite_page(
                    page_path, Path(work_folder), run_slow=options.slow, rewrite_all=options.all
                )
            except PageError as error:
                refused_pages += 1
                print(f"{page_path}: not written: {error}", file=sys.stderr, flush=True)
            else:
                print(f"{page_path}: {output_count} outputs written", flush=True)
    if refused_pages:
        sys.exit(1)


def rewrite_page(page_path: Path, work_folder: Path, *, run_slow: bool, rewrite_all: bool) -> int:
    """Write the outputs of one page; return how many changed.

    Raises:
        PageError: a block fails, or prints where the page has no place for it. The page is unchanged.
    """
    full_path = ROOT / page_path
    if changes_the_tree(page_path):
        copy_tree(work_folder)
    session = Session(work_folder, is_fresh=True)
    page_text = full_path.read_text()
    page_blocks = read_blocks(full_path)
    text_edits: list[tuple[int, int, str]] = []
    try:
        for block, next_block in itertools.zip_longest(page_blocks, page_blocks[1:]):
            if block.not_run and not (run_slow and block.not_run.startswith("slow")):
                continue
            try:
                block_outputs = list(map(without_times, session.run(block)))
            except (RuntimeError, ValueError) as error:
                raise PageError(f"line {block.line}: {error}") from None
            _check_failures(block, next_block, block_outputs)
            text_edits += _block_edits(page_text, block, next_block, block_outputs, rewrite_all=rewrite_all)
    finally:
        session.close()
    for edit_start, edit_end, replacement in reversed(text_edits):
        page_text = page_text[:edit_start] + replacement + page_text[edit_end:]
    full_path.write_text(page_text)
    return len(text_edits)


def _check_failures(block: Block, next_block: Block | None, block_outputs: list[str]) -> None:
    """Raise `PageError` for an output that shows a failure which the page does not state."""
    for stated_output, actual_output in zip(stated_outputs(block, next_block), block_outputs, strict=True):
        if failure := find_unwanted_failure(block, stated_output, actual_output):
            raise PageError(
                f"line {block.line}: the block fails with {failure}. Mend it; or, if the page is to show the failure, write "
                f"[exit status N] below the output of the command, or <!-- fails: REASON --> above the block. It printed:\n"
                f"{actual_output}"
            )


def _block_edits(
    page_text: str, block: Block, next_block: Block | None, block_outputs: list[str], *, rewrite_all: bool
) -> list[tuple[int, int, str]]:
    """The changes of the page's text: first character, end, and what comes there."""
    if block.kind == "python":
        [stated_output] = stated_outputs(block, next_block)
        if is_same_output(stated_output, block_outputs[0]) and not (rewrite_all and stated_output):
            return []
        if next_block is None or next_block.kind != "output":
            raise PageError(
                f'line {block.line}: the block prints, but no block `text title="Output"` follows:\n{block_outputs[0]}'
            )
        return [_with_source(page_text, next_block, block_outputs[0])]
    if block.kind != "console":
        return []
    block_commands = list(read_commands(block.source))
    same_flags = [
        is_same_output(block_command.stated_output, actual_output)
        # The digest of a frozen bundle is a fact, and no chance.
        and (
            "schema/frozen" not in block_command.command_text
            or has_same_digests(block_command.stated_output, actual_output)
        )
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
