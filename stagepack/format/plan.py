"""A plan: which nodes of the whole model each stage gets, and what that is expected to cost (SPEC M13).

Costs are those of one call at the sizes of the example.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from stagepack.format.limits import Int64

# Nodes that stand side by side in the whole model: the number of the first, and how many.
Run = tuple[Int64, Int64]


def to_runs(numbers: Iterable[int]) -> tuple[Run, ...]:
    """Ascending numbers as runs: the first of those that follow one another, and how many."""
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    listed = ([number for _, number in group] for _, group in groups)
    return tuple((group[0], len(group)) for group in listed)


def run_members(found: Iterable[Run]) -> Iterator[int]:
    """Yield the numbers of runs, in order: the inverse of `runs`."""
    return itertools.chain.from_iterable(range(first, first + count) for first, count in found)


class PlannedStage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage of a plan.

    Attributes:
        nodes: the nodes of the whole model that it gets.
        module: the path of the module of its first node, for people.
        weight_bytes: bytes of its weights.
        flops: floating-point operations of one call.
        bytes: bytes that its operators read and write in memory.
        received: bytes that it receives from other stages and from the caller.
        picoseconds: expected time of its nodes on a device of speed 1.
        receiving: expected time of receiving, in picoseconds.
        memory: bytes that it needs: its weights, and at most so much for activations.
        memory_limit: bytes that its device has, when a limit was given.
        speed: of its device, relative to the others.
    """

    nodes: tuple[Run, ...]
    module: str = ""
    weight_bytes: Int64 = 0
    flops: Int64 = 0
    bytes: Int64 = 0
    received: Int64 = 0
    picoseconds: Int64 = 0
    receiving: Int64 = 0
    memory: Int64 = 0
    memory_limit: Int64 | None = None
    speed: float = 1.0

    @property
    def time(self) -> float:
        """Expected time of one call on its device, in picoseconds."""
        return self.picoseconds / self.speed + self.receiving


class Plan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is cut.

    Attributes:
        shared: what becomes of a weight that several stages use: each holds it, or the first one holds it and sends it.
    """

    stages: tuple[PlannedStage, ...]
    shared: Literal["replicate", "transmit"] = "replicate"
