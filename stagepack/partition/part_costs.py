"""The costs of consecutive stages on a device: times in picoseconds, memory in bytes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stagepack.partition.costs import LinkCosts
from stagepack.partition.solver import SharedCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Stages in order, with what they hold and receive in bytes."""

    # Values that stages receive; a producer of -1 is the caller.
    values: tuple[SharedCost, ...]
    weights: tuple[SharedCost, ...]
    # Memory of each stage while it runs, besides its weights.
    working_bytes: tuple[int, ...]
    caller_host: str

    def received(self, start: int, end: int) -> list[SharedCost]:
        """Return the values that a part receives."""
        return [value for value in self.values if value.producer < start and value.is_used(start, end)]

    def weight_bytes(self, start: int, end: int) -> int:
        """Return the bytes of the weights of a part."""
        return sum(weight.cost for weight in self.weights if weight.is_used(start, end))

    def memory_bytes(self, start: int, end: int) -> int:
        """Return the memory of a part: its weights, what arrives for the next call, and the activations of the stage that has most."""
        arriving_bytes = sum(value.cost for value in self.received(start, end))
        return self.weight_bytes(start, end) + arriving_bytes + max(self.working_bytes[start:end], default=0)

    def least_memory(self) -> int:
        """Return the memory of the stage that needs least."""
        needed = list(self.working_bytes)
        for cost in (*self.values, *self.weights):
            for user in cost.users:
                needed[user] += cost.cost
        return min(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """A device for stages."""

    times: tuple[float, ...]  # of each stage
    memory: float  # infinite without a limit
    host: str
    near: LinkCosts  # from the devices of its host
    far: LinkCosts  # from those of other hosts

    @property
    def far_excess(self) -> tuple[float, float]:
        """How much longer a value, and a byte, takes from another host."""
        return self.far.per_value - self.near.per_value, self.far.per_byte - self.near.per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """The time of a device in one call."""

    computing: float
    receiving: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.computing + self.receiving


def part_times(stages: StageCosts, devices: Sequence[DeviceCosts], counts: Sequence[int]) -> list[PartTime]:
    """Return the time of each device in one call, when it has a number of stages; 0 for one without stages."""
    bounds = [0, *itertools.accumulate(counts)]
    # The caller is stage -1.
    hosts = [device.host for device, count in zip(devices, counts, strict=True) for _ in range(count)]
    hosts.append(stages.caller_host)
    times = []
    for device, (start, end) in zip(devices, itertools.pairwise(bounds), strict=True):
        received = stages.received(start, end) if end > start else []
        links = [device.near if hosts[value.producer] == device.host else device.far for value in received]
        receiving = (link.per_value + link.per_byte * value.cost for link, value in zip(links, received, strict=True))
        times.append(PartTime(computing=sum(device.times[start:end]), receiving=sum(receiving)))
    return times
