"""Which weights of a stage stay in the memory of its device, and where the others pass through it, when not all fit.

The memory for weights that pass through is a ring: they are placed one after the other in the order of their first use, and from the
start again when the end is reached. A place is free again after the last use of the weights that have it, in order.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from stagepack.errors import OptionError
from stagepack.format.aliasing import alias_classes
from stagepack.format.graph import FoldedGraph, Graph
from stagepack.format.quantities import format_bytes
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.region_functions import RegionCallSite, region_functions

PLACE_ALIGNMENT: Final = 4096
# The ring cannot go on before the last use of its oldest weights. So weights that are used over more steps than a limit stay; of these
# limits the one is taken with which the least memory is enough.
_USE_LENGTH_LIMITS: Final = (1, 4, 16, 64)
_WINDOW_TRIALS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """Weights of a graph that are used in the same steps. A step is a node or a call of a region.

    Attributes:
        weights: their indices in the weight table.
        first_step: the number of the first step that uses one of them.
        last_step: the number of the last step that uses one of them, or a view of one; the number of steps if the graph returns it.
        byte_count: their size, for a plan; before it, that of what stays beside them.
        must_stay: they cannot pass through, for example because calls write them.
    """

    weights: tuple[int, ...] = ()
    first_step: int
    last_step: int
    byte_count: int = 0
    must_stay: bool = False

    @property
    def place_bytes(self) -> int:
        """The size of their place in the ring: places are aligned for direct reads."""
        return place_bytes(self.byte_count)


def weight_uses(folded: FoldedGraph, graph: Graph) -> list[WeightUse]:
    """Return the uses of the weights of a graph, in the order of first use. Weights that nothing uses are in none."""
    items, regions = region_functions(folded, graph)
    step_of_node: list[int] = []
    for step_number, item in enumerate(items):
        step_of_node += [step_number] * (regions[item.region].length if isinstance(item, RegionCallSite) else 1)
    # Views of a weight share its memory: the weight is in use as long as they are.
    classes = alias_classes(graph)
    steps: dict[str, list[int]] = {}
    for node_number, node in enumerate(graph.nodes):
        for value_name in (*input_names(node), *output_names(node)):
            steps.setdefault(classes.representative(value_name), []).append(step_of_node[node_number])
    for value_name in graph.outputs:
        steps.setdefault(classes.representative(value_name), []).append(len(items))
    weights_of_steps: dict[tuple[int, int], list[int]] = {}
    for weight_index, weight in enumerate(graph.weights):
        used_steps = steps.get(classes.representative(weight.value))
        if used_steps:
            weights_of_steps.setdefault((used_steps[0], used_steps[-1]), []).append(weight_index)
    return [
        WeightUse(weights=tuple(indices), first_step=first, last_step=last)
        for (first, last), indices in sorted(weights_of_steps.items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Which weights of a stage stay in the memory of its device.

    Attributes:
        resident_bytes: the size of the weights that stay.
        streamed_bytes: the size of the weights that pass through in each call.
        window_bytes: the size of the ring that they pass through, which all stages on the device share.
    """

    resident_bytes: int
    streamed_bytes: int
    window_bytes: int

    def __str__(self) -> str:
        resident_text = f"{self.resident_bytes / 1e6:.1f} MB of weights stay"
        if not self.streamed_bytes:
            return resident_text
        return f"{resident_text}, {self.streamed_bytes / 1e6:.1f} MB pass through {self.window_bytes / 1e6:.1f} MB in each call"


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where weights are.

    Attributes:
        positions: for each use, its position in the endless sequence of places; its place in the ring is this modulo `window_bytes`.
            None for weights that stay.
        window_bytes: the size of the ring.
    """

    positions: tuple[int | None, ...]
    window_bytes: int

    def residency(self, uses: Sequence[WeightUse], first_index: int = 0) -> Residency:
        """Return which weights stay, of uses that are in the plan from an index on."""
        streamed_bytes = sum(
            use.byte_count
            for use, position in zip(uses, self.positions[first_index:], strict=False)
            if position is not None
        )
        resident_bytes = sum(use.byte_count for use in uses) - streamed_bytes
        return Residency(resident_bytes=resident_bytes, streamed_bytes=streamed_bytes, window_bytes=self.window_bytes)


def joined_uses(uses_of_stages: Sequence[Sequence[WeightUse]]) -> list[WeightUse]:
    """Return the uses of stages that run one after the other, with their steps numbered on."""
    uses: list[WeightUse] = []
    for stage_uses in uses_of_stages:
        start = max((use.last_step for use in uses), default=-1) + 1
        uses += [replace(use, first_step=use.first_step + start, last_step=use.last_step + start) for use in stage_uses]
    return uses


def place_bytes(byte_count: int) -> int:
    """Return the size of the place of weights of `byte_count` bytes."""
    return -(-byte_count // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


def least_bytes(uses: Sequence[WeightUse]) -> int:
    """Return the least memory that a plan needs, in bytes."""
    return min(sum(use.byte_count for use in uses), _choose_candidates(uses).least_bytes)


def plan_window(uses: Sequence[WeightUse], memory_bytes: int) -> WindowPlan:
    """Choose the weights that stay, and place the others in the remaining memory.

    The weights that stay are spread evenly over the stage, so that while it computes with them, others arrive.
    """
    if sum(use.byte_count for use in uses) <= memory_bytes:
        return WindowPlan((None,) * len(uses), 0)
    chosen = _choose_candidates(uses)
    if memory_bytes < chosen.least_bytes:
        raise OptionError(
            f"device_memory: the weights need at least {format_bytes(chosen.least_bytes)} on one device, found "
            f"{format_bytes(memory_bytes)}: give more, or use more devices"
        )
    candidates, least_window = chosen.indices, chosen.window_bytes
    free_bytes = memory_bytes - (chosen.least_bytes - least_window)
    # Room for the weights in use and for those that come next, if half of the memory is left for weights that stay.
    window = max(least_window, min(2 * least_window, free_bytes // 2 // PLACE_ALIGNMENT * PLACE_ALIGNMENT))
    streamed = _without_residents(uses, candidates, free_bytes - window)
    positions = _positions([uses[index] for index in streamed], window)
    if not _fits([uses[index] for index in streamed], positions, window):
        streamed, window = candidates, least_window
        positions = _positions([uses[index] for index in streamed], window)
    position_of_use = dict(zip(streamed, positions, strict=True))
    return WindowPlan(tuple(position_of_use.get(index) for index in range(len(uses))), window)


class _Candidates(NamedTuple):
    """The uses that can pass through the ring, the smallest ring for all of them, and that with the weights of all other uses."""

    indices: list[int]
    window_bytes: int
    least_bytes: int


def _choose_candidates(uses: Sequence[WeightUse]) -> _Candidates:
    choices = []
    for limit in _USE_LENGTH_LIMITS:
        indices = [
            index for index, use in enumerate(uses) if not use.must_stay and use.last_step - use.first_step <= limit
        ]
        window_bytes = _least_window([uses[index] for index in indices])
        staying_bytes = sum(use.byte_count for use in uses) - sum(uses[index].byte_count for index in indices)
        choices.append(_Candidates(indices, window_bytes, staying_bytes + window_bytes))
    return min(choices, key=lambda choice: choice.least_bytes)


def _without_residents(uses: Sequence[WeightUse], candidates: Sequence[int], resident_bytes: int) -> list[int]:
    """The candidates that pass through the ring, when the others have at most `resident_bytes`."""
    share = resident_bytes / max(1, sum(uses[index].byte_count for index in candidates))
    streamed = []
    credit, remaining = 0.0, resident_bytes
    for index in candidates:
        byte_count = uses[index].byte_count
        credit += byte_count * share
        if byte_count <= min(credit, remaining):
            credit -= byte_count
            remaining -= byte_count
        else:
            streamed.append(index)
    return streamed


def _least_window(uses: Sequence[WeightUse]) -> int:
    """The size of the smallest ring that was found for uses."""
    # The places between the oldest use that goes on and the newest one, which are freed in order.
    starts = [0, *itertools.accumulate(use.place_bytes for use in uses)]
    live_bytes = oldest = 0
    for index, use in enumerate(uses):
        while oldest < index and uses[oldest].last_step < use.first_step:
            oldest += 1
        live_bytes = max(live_bytes, starts[index + 1] - starts[oldest])
    # At the end of the ring a part is lost, which is smaller than a place.
    largest_place = max((use.place_bytes for use in uses), default=0)
    for part in range(_WINDOW_TRIALS + 1):
        window = live_bytes + place_bytes(largest_place * part // _WINDOW_TRIALS)
        if _fits(uses, _positions(uses, window), window):
            return window
    return sum(use.place_bytes for use in uses)


def _positions(uses: Sequence[WeightUse], window: int) -> list[int]:
    """The positions of uses one after the other. A place does not go over the end of the ring."""
    positions, position = [], 0
    for use in uses:
        if position % window + use.place_bytes > window:
            position += window - position % window
        positions.append(position)
        position += use.place_bytes
    return positions


def _fits(uses: Sequence[WeightUse], positions: Sequence[int], window: int) -> bool:
    """Whether each use has a free place when it begins: places are freed in order."""
    oldest = 0
    for index, use in enumerate(uses):
        while oldest < index and uses[oldest].last_step < use.first_step:
            oldest += 1
        if positions[index] + use.place_bytes - positions[oldest] > window:
            return False
    return True
