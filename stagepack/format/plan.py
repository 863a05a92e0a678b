"""The plan: the nodes of each stage, and the estimated costs of one call at the sizes of the example (SPEC M13)."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from stagepack.format.limits import Int64

# Consecutive nodes of the whole model: the number of the first node, and the number of nodes.
Run = tuple[Int64, Int64]


def to_runs(node_numbers: Iterable[int]) -> tuple[Run, ...]:
    """Return ascending numbers as runs of consecutive numbers.

    Law: ``list(run_members(to_runs(node_numbers))) == list(node_numbers)``.
    """
    groups = itertools.groupby(enumerate(node_numbers), key=lambda pair: pair[1] - pair[0])
    member_lists = ([node_number for _, node_number in group] for _, group in groups)
    return tuple((members[0], len(members)) for members in member_lists)


def run_members(runs: Iterable[Run]) -> Iterator[int]:
    """Yield the numbers in runs, in order. This is the inverse of `to_runs`."""
    return itertools.chain.from_iterable(range(first, first + count) for first, count in runs)


class PlannedStage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage of a plan.

    Attributes:
        nodes: the nodes of the whole model that are assigned to the stage.
        module: the path of the module of its first node, for display.
        weight_bytes: bytes of its weights.
        flops: floating-point operations of one call.
        bytes: bytes that its operators read and write in memory.
        received: bytes that it receives from other stages and from the caller.
        picoseconds: estimated time of its nodes on a device of speed 1.
        receiving: estimated time of receiving, in picoseconds.
        memory: bytes of memory that it needs: its weights, and an upper bound of its activations.
        memory_limit: bytes of memory of its device, if a limit was given.
        speed: speed of its device relative to the other devices.
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
        """Estimated time of one call on the device of the stage, receiving included, in picoseconds."""
        return self.picoseconds / self.speed + self.receiving


class Plan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cut of a model.

    Attributes:
        stages: the stages in order.
        shared: how a weight that several stages use is shared: each stage holds it (`replicate`), or the first one holds it and sends
            it at each call (`transmit`).
    """

    stages: tuple[PlannedStage, ...]
    shared: Literal["replicate", "transmit"] = "replicate"
