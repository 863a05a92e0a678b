"""The values of a pipeline, by what draws them: an arrow to the next cell, or a lane."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagepack.cli.quantities import format_bytes
from stagepack.cli.stage_diagram import Arrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What leaves or joins a lane at one cell."""

    cell: int
    title: str
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A lane: one sender with branches to its receivers, or one receiver with branches from its senders.

    Attributes:
        root: the cell with one line, where all values come from or go to.
        branches: the other ends, in the order of their cells.
        collects: whether the root is the receiver.
        kind: as for `Line`.
    """

    root: int
    branches: tuple[Branch, ...]
    collects: bool
    kind: str

    @property
    def cells(self) -> list[int]:
        """All its cells, in order."""
        return sorted([self.root, *(branch.cell for branch in self.branches)])

    def receives(self, cell: int) -> bool:
        """Whether the line at one of its cells points to the cell."""
        return (cell == self.root) == self.collects

    @property
    def title(self) -> str:
        """Names and bytes of all its values."""
        return "\n".join(branch.title for branch in self.branches)


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


def _ordered(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda branch: branch.cell))


def _cell_name(name: str) -> str:
    return name.replace("stage", "stage ")


def packed_lanes(spans: Mapping[Net, tuple[int, int]]) -> dict[Net, int]:
    """Return a lane for each net, so that the spans of one lane are disjoint; short spans first."""
    lanes: list[list[tuple[int, int]]] = []
    packed: dict[Net, int] = {}
    for net, (start, end) in sorted(spans.items(), key=lambda entry: entry[1][1] - entry[1][0]):
        lane = next(
            (
                index
                for index, taken in enumerate(lanes)
                if all(end < other_start or other_end < start for other_start, other_end in taken)
            ),
            len(lanes),
        )
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((start, end))
        packed[net] = lane
    return packed
