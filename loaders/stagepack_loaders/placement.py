"""The placement of stages: the device of each."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeVar

from stagepack.errors import DeviceError
from stagepack.format.graph import value_bytes
from stagepack.format.manifest import EntryPoint
from stagepack.format.shapes import example_sizes
from stagepack.partition.costs import REFERENCE_LINK
from stagepack.partition.solver import CostSequence, SharedCost, split_sequence

Device = TypeVar("Device")


def place_stages(entry_point: EntryPoint, devices: Sequence[Device]) -> list[Device]:
    """Return the device of each stage.

    With fewer devices than stages, consecutive stages share one, so that the largest time of a device is as small as possible. The
    times of the stages are those that the plan of the bundle estimates; without a plan, in proportion to the bytes of their weights.
    """
    stages = entry_point.stages
    if not 1 <= len(devices) <= len(stages):
        raise DeviceError(f"expected 1 to {len(stages)} devices for {len(stages)} stages, found {len(devices)}")
    starts = split_sequence(_cost_sequence(entry_point), [1.0] * len(devices), [None] * len(devices))
    assert starts is not None  # there is always a split, without limits of memory
    return [devices[bisect_right(starts, stage_number)] for stage_number in range(len(stages))]


def _cost_sequence(entry_point: EntryPoint) -> CostSequence:
    """The stages as items to split between devices."""
    if entry_point.plan is None:
        times = [stage.weight_bytes for stage in entry_point.stages]
    else:
        times = [stage.picoseconds for stage in entry_point.plan.stages]
    sizes = example_sizes(entry_point.symbols)
    return CostSequence(
        times=[max(1, time) for time in times],
        transfers=[
            SharedCost(
                cost=REFERENCE_LINK.sending_time(value_bytes(edge, sizes)),
                users=edge.consumers,
                producer=-1 if edge.producer is None else edge.producer,
            )
            for edge in entry_point.edges
            if edge.consumers
        ],
        weights=[],
        working_bytes=[0] * len(times),
        split_positions=range(1, len(times)),
    )
