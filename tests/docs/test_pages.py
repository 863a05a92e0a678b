"""Every code block of README, CONTRIBUTING and docs is run; what it prints is what the page states.

`make docs-outputs` writes the outputs into the pages. `tools/docs/page.py` says what the blocks are.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.docs.compared_outputs import check_output, find_unwanted_failure, is_same_output
from tools.docs.page import ROOT, Block, changes_the_tree, documented_pages, read_blocks, stated_outputs
from tools.docs.session import Session, copy_tree

BLOCKS_OF_PAGE = {str(page): read_blocks(ROOT / page) for page in documented_pages()}
# What the outputs in the pages were written with. Another torch makes other graphs, so that only errors count there.
_PIN = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
assert _PIN is not None
IS_PINNED_TORCH = torch.__version__.split("+")[0] == _PIN[1]


class _PageRun:
    """The session of a page, and how many of its blocks have run."""

    def __init__(self, page: str, folder: Path) -> None:
        self.blocks = BLOCKS_OF_PAGE[page]
        in_copy = changes_the_tree(Path(page))
        if in_copy:
            copy_tree(folder)
        self.session = Session(folder, is_fresh=in_copy)
        self.position = 0

    def run(self, block: Block) -> str:
        """Run a block, and those before it that have not run, slow ones for a slow block alone; return what is wrong with it."""
        problem = ""
        while self.position <= self.blocks.index(block):
            block_index = self.position
            self.position += 1
            current_block = self.blocks[block_index]
            if current_block.not_run or (current_block.slow and not block.slow):
                continue
            block_outputs = self.session.run(current_block)
            next_block = self.blocks[block_index + 1] if block_index + 1 < len(self.blocks) else None
            problem = check_output(
                current_block, next_block, block_outputs, is_same_output if IS_PINNED_TORCH else lambda *_: True
            )
        return problem


class _PageRuns:
    """The sessions of all pages, made when they are first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, _PageRun] = {}

    def of(self, page: str) -> _PageRun:
        if page not in self.runs:
            self.runs[page] = _PageRun(page, self.folder / page.replace("/", "-"))
        return self.runs[page]


@pytest.fixture(scope="module")
def page_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_PageRuns]:
    """The sessions of all pages."""
    page_runs = _PageRuns(tmp_path_factory.mktemp("pages"))
    yield page_runs
    for run in page_runs.runs.values():
        run.session.close()


# Pages that write code into a copy of the tree, and run its tests: a sixth of the time of all pages.
_IS_SLOW = {page: changes_the_tree(Path(page)) for page in BLOCKS_OF_PAGE}
TESTED_BLOCKS = [
    pytest.param(
        page,
        block,
        id=f"{page}:{block.line}",
        marks=[*([pytest.mark.slow] if _IS_SLOW[page] or block.slow else []), pytest.mark.xdist_group(f"docs {page}")],
    )
    for page, blocks in BLOCKS_OF_PAGE.items()
    for block in blocks
    if block.kind not in ("shown", "output")
]


@pytest.mark.parametrize(("page", "block"), TESTED_BLOCKS)
def test_block(page: str, block: Block, page_runs: _PageRuns) -> None:
    """A block runs, and prints what the page states."""
    assert block.kind != "unknown" or block.not_run, f"```{block.language}: neither run nor marked `not run`"
    if block.not_run:
        pytest.skip(f"not run: {block.not_run}")
    problem = page_runs.of(page).run(block)
    if problem:
        pytest.fail(f"{page}:{block.line}: {problem}\n`make docs-outputs` writes the outputs anew.", pytrace=False)


@pytest.mark.parametrize("page", BLOCKS_OF_PAGE)
def test_no_page_states_a_failure_that_it_does_not_want(page: str) -> None:
    assert "internal error:" not in (ROOT / page).read_text()
    blocks = BLOCKS_OF_PAGE[page]
    for block, next_block in itertools.zip_longest(blocks, blocks[1:]):
        for output in stated_outputs(block, next_block):
            assert find_unwanted_failure(block, output, output) == "", f"{page}:{block.line}"
