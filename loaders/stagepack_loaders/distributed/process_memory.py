"""How much memory of its host a process of a pipeline needs, estimated from the manifest. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import value_bytes
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes
from stagepack.partition.shared_weights import weight_costs
from stagepack_loaders.options import DEFAULT_IN_FLIGHT
from stagepack_loaders.placement import place_stages

# Measured: a process of stages has 160 MB of private memory besides its weights, one that has used CUDA about 2 GB; it keeps at most
# `LARGEST_KEPT_BYTES` twice, for what it receives and for what it sends.
_PROCESS_BYTES: Final = 512 * 2**20
_CUDA_PROCESS_BYTES: Final = 3 * 2**30
# Sequences whose state is counted: as many as a server keeps by default.
DEFAULT_SEQUENCES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of its host that a process needs, in bytes. Activations and state are 0 on other devices."""

    weights: int  # of its stages; for other devices they are read through the memory of the host too, stage by stage
    activations: int  # of the stage that has most
    buffers: int  # for what arrives for the requests in flight
    state: int  # of sequences
    process: int  # itself, with its libraries

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.activations + self.buffers + self.state + self.process


def estimate_memory(
    bundle: Bundle,
    rank_of_stage: Sequence[int],
    rank: int,
    *,
    devices: Sequence[str] = ("cpu",),
    sizes: Mapping[str, int] | None = None,
    in_flight: int = DEFAULT_IN_FLIGHT,
    sequences: int = DEFAULT_SEQUENCES,
) -> ProcessMemory:
    """Estimate the memory of its host that a process needs.

    devices: the device of each stage, in order; with fewer devices, consecutive stages share one.
    """
    stage_numbers = [number for number, stage_rank in enumerate(rank_of_stage) if stage_rank == rank]
    stage_devices = place_stages(bundle.entry_point, devices)
    host_stages = [number for number in stage_numbers if stage_devices[number].partition(":")[0] == "cpu"]
    costs = list(weight_costs(bundle.entry_point, bundle.files.values()))
    weight_bytes = [bundle.stages[number].weight_bytes for number in stage_numbers]
    all_weights = sum(weight.cost for weight in costs if not set(weight.users).isdisjoint(stage_numbers))
    sizes_of_example = example_sizes(bundle.entry_point.symbols)
    largest_sizes = sizes_of_example | dict(sizes or {})
    crossing_bytes = sum(
        value_bytes(edge, largest_sizes)
        for edge in bundle.edges
        if edge.producer not in stage_numbers and not set(edge.consumers).isdisjoint(stage_numbers)
    )
    return ProcessMemory(
        weights=all_weights if len(host_stages) == len(stage_numbers) else max(weight_bytes, default=0),
        activations=max(
            (_activation_bytes(bundle, number, sizes_of_example, largest_sizes) for number in host_stages), default=0
        ),
        buffers=in_flight * crossing_bytes,
        state=sequences * sum(_state_bytes(bundle, number) for number in host_stages),
        process=_PROCESS_BYTES if len(host_stages) == len(stage_numbers) else _CUDA_PROCESS_BYTES,
    )


def _activation_bytes(
    bundle: Bundle, stage_number: int, sizes_of_example: Mapping[str, int], largest_sizes: Mapping[str, int]
) -> int:
    """The estimate of the plan, which is for the sizes of the example, in proportion to what the stage takes and returns."""
    stage = bundle.stages[stage_number]
    edges = [edge for edge in bundle.edges if edge.name in stage.inputs or edge.name in stage.outputs]
    edge_bytes = _sum_bytes(edges, sizes_of_example)
    if bundle.entry_point.plan is None:
        return 2 * _sum_bytes(edges, largest_sizes)
    planned = bundle.entry_point.plan.stages[stage_number]
    activation_bytes = max(planned.memory - planned.weight_bytes, edge_bytes)
    return activation_bytes * _sum_bytes(edges, largest_sizes) // max(edge_bytes, 1)


def _sum_bytes(edges: Sequence[Edge], sizes: Mapping[str, int]) -> int:
    return sum(value_bytes(edge, sizes) for edge in edges)


def _state_bytes(bundle: Bundle, stage_number: int) -> int:
    state_names = set(bundle.stages[stage_number].state)
    if not state_names:
        return 0
    graph = bundle.graph_file(stage_number, module_calls=False).graph
    return sum(
        math.prod(weight.shape) * ITEM_SIZE.get(weight.dtype, 8)
        for weight in graph.weights
        if not state_names.isdisjoint(weight.names)
    )
