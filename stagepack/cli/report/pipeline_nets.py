"""The values of a pipeline, by what draws them: an arrow to the next cell, or a lane."""

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagepack.cli.quantities import format_bytes
from stagepack.cli.stage_diagram import Arrow

# Of the title of a net, which each line of its lane repeats.
_MOST_TITLE_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What leaves or joins a lane at one cell."""

    cell: int
    title: str
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Net:
    """A lane: one sender with branches to its receivers, or one receiver with branches from its senders.

    Nets are keys of dicts by their identity: to compare all their branches takes long.

    Attributes:
        root: the cell with one line, where all values come from or go to.
        branches: the other ends, in the order of their cells.
        collects: whether the root is the receiver.
        kind: as for `Line`.
        cells: the cells of its ends, in order.
        title: names and bytes of its values, of so many branches as fit into a title.
    """

    root: int
    branches: tuple[Branch, ...]
    collects: bool
    kind: str
    cells: tuple[int, ...] = field(init=False)
    title: str = field(init=False)

    def __post_init__(self) -> None:
        cells = sorted([self.root, *(branch.cell for branch in self.branches)])
        object.__setattr__(self, "cells", tuple(cells))
        object.__setattr__(self, "title", _joined_titles([branch.title for branch in self.branches]))

    def receives(self, cell: int) -> bool:
        """Whether the line at one of its cells points to the cell."""
        return (cell == self.root) == self.collects

    def cells_by_row(self, columns: int) -> dict[int, list[int]]:
        """Return its cells in each row that has one, in order."""
        cells_of_row: dict[int, list[int]] = {}
        for cell in self.cells:
            cells_of_row.setdefault(cell // columns, []).append(cell)
        return cells_of_row


class Step(NamedTuple):
    """The values from a cell to the next one."""

    cell: int
    title: str
    byte_count: int


def connections(all_arrows: Iterator[Arrow], cell_count: int) -> tuple[list[Step], list[Net]]:
    """Return the values for the next cell, and the nets of all others."""
    cells = {"input": 0, "result": cell_count - 1} | {f"stage{index}": index + 1 for index in range(cell_count - 2)}
    steps: list[Step] = []
    sent: dict[int, list[Branch]] = {}
    returned: list[Branch] = []
    for arrow in all_arrows:
        source, target = cells[arrow.source], cells[arrow.target]
        title = (
            f"{_cell_name(arrow.source)} to {_cell_name(arrow.target)}: {arrow.label}, {format_bytes(arrow.byte_count)}"
        )
        if target == source + 1:
            steps.append(Step(source, title, arrow.byte_count))
        elif target == cell_count - 1:
            returned.append(Branch(cell=source, title=title, byte_count=arrow.byte_count))
        else:
            sent.setdefault(source, []).append(Branch(cell=target, title=title, byte_count=arrow.byte_count))
    nets = [
        Net(root=source, branches=_ordered(branches), collects=False, kind="skip" if source else "ends")
        for source, branches in sorted(sent.items())
    ]
    if returned:
        nets.append(Net(root=cell_count - 1, branches=_ordered(returned), collects=True, kind="ends"))
    return steps, nets


def _joined_titles(titles: Sequence[str]) -> str:
    """The titles as lines; of many, the first ones and how many more there are."""
    line_ends = itertools.accumulate(len(title) + 1 for title in titles)
    line_count = max(1, sum(line_end <= _MOST_TITLE_CHARACTERS for line_end in line_ends))
    remainder = [f"and {len(titles) - line_count} more"] if line_count < len(titles) else []
    return "\n".join([*titles[:line_count], *remainder])


def _ordered(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda branch: branch.cell))


def _cell_name(name: str) -> str:
    return name.replace("stage", "stage ")


def packed_lanes(spans: Mapping[Net, tuple[int, int]]) -> dict[Net, int]:
    """Return a lane for each net, so that the spans of one lane are disjoint; short spans first."""
    # The lanes that are taken at each position, as the bits of an integer.
    taken = [0] * (max((end for _, end in spans.values()), default=0) + 1)
    packed: dict[Net, int] = {}
    for net, (start, end) in sorted(spans.items(), key=lambda entry: entry[1][1] - entry[1][0]):
        taken_lanes = functools.reduce(operator.or_, taken[start : end + 1])
        lane_bit = ~taken_lanes & (taken_lanes + 1)  # the lowest lane that is free
        taken[start : end + 1] = [lanes | lane_bit for lanes in taken[start : end + 1]]
        packed[net] = lane_bit.bit_length() - 1
    return packed
