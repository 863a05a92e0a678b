"""A sequence of items with their costs, and what consecutive items cost together."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCost:
    """A cost that a part has once, however many of its items use what causes it.

    Attributes:
        cost: picoseconds for a value that is received, bytes for a weight that is held.
        users: the items that use it, ascending.
        producer: the item that produces it, since a part with this item need not receive it; -1 for an input from outside.
    """

    cost: int
    users: Sequence[int]
    producer: int = -1

    def is_used(self, start: int, end: int) -> bool:
        """Tell whether a part has the cost, apart from its producer."""
        first_user = bisect.bisect_left(self.users, start)
        return first_user < len(self.users) and self.users[first_user] < end


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSequence:
    """Items in order, with their costs.

    Attributes:
        times: time of each item on a device of speed 1, in picoseconds.
        transfers: cost of receiving each value, in picoseconds.
        weights: bytes of each weight.
        working_bytes: memory in use while an item runs, besides the weights.
        split_positions: the items in front of which the sequence may be split, ascending.
    """

    times: Sequence[int]
    transfers: Sequence[SharedCost]
    weights: Sequence[SharedCost]
    working_bytes: Sequence[int]
    split_positions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The cost of consecutive items.

    Attributes:
        compute_time: picoseconds of the items on a device of speed 1.
        receiving_time: picoseconds to receive the values that the items use and do not produce.
        weight_bytes: bytes of the weights that the items use.
        memory_bytes: `weight_bytes` and the most working memory of an item.
    """

    compute_time: int
    receiving_time: int
    weight_bytes: int
    memory_bytes: int

    def time_at(self, speed: float) -> float:
        """Return the time on a device, that of receiving included."""
        return self.compute_time / speed + self.receiving_time


def part_cost(sequence: CostSequence, start: int, end: int) -> PartCost:
    """Compute the cost of consecutive items."""
    received = (value for value in sequence.transfers if value.producer < start)
    weight_bytes = sum(weight.cost for weight in sequence.weights if weight.is_used(start, end))
    return PartCost(
        compute_time=sum(sequence.times[start:end]),
        receiving_time=sum(value.cost for value in received if value.is_used(start, end)),
        weight_bytes=weight_bytes,
        memory_bytes=weight_bytes + max(sequence.working_bytes[start:end], default=0),
    )
