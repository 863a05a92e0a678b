"""Which stage goes on which device."""

from collections.abc import Sequence
from typing import TypeVar

from stagepack.errors import DeviceError
from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.manifest import Manifest
from stagepack.partition.cost_sequence import CostSequence, SharedCost
from stagepack.partition.costs import sending_time
from stagepack.partition.solver import split_sequence

Device = TypeVar("Device")


def place(manifest: Manifest, devices: Sequence[Device]) -> list[Device]:
    """One device a stage; with fewer devices than stages, consecutive stages share one, so that the slowest device is fastest.

    The times of the stages are those of the bundle's plan, without a plan their bytes of weights.

    Raises:
        DeviceError: no device, or more devices than stages.
    """
    stages = manifest.stages
    if not 1 <= len(devices) <= len(stages):
        raise DeviceError(f"expected 1 to {len(stages)} devices for {len(stages)} stages, found {len(devices)}")
    starts = split_sequence(_row(manifest), [1.0] * len(devices), [None] * len(devices))
    assert starts is not None  # without limits of memory there is always a split
    ends = [*starts, len(stages)]
    return [devices[next(n for n, end in enumerate(ends) if stage < end)] for stage in range(len(stages))]


def _row(manifest: Manifest) -> CostSequence:
    """The stages as items to split."""
    if manifest.plan is None:
        times = [stage.weight_bytes for stage in manifest.stages]
    else:
        times = [stage.picoseconds for stage in manifest.plan.stages]
    sizes = example_sizes(manifest.symbols)
    return CostSequence(
        times=[max(1, time) for time in times],
        transfers=[
            SharedCost(
                cost=sending_time(value_bytes(edge, sizes)),
                users=edge.consumers,
                producer=-1 if edge.producer is None else edge.producer,
            )
            for edge in manifest.edges
            if edge.consumers
        ],
        weights=[],
        working_bytes=[0] * len(times),
        split_positions=range(1, len(times)),
    )
