"""The cut ``stages="layers"``: a stage for each layer, with what stands before the first, after the last, and between two of them."""

import itertools
from collections.abc import Iterator, Sequence

from stagepack.errors import CutError
from stagepack.format import limits
from stagepack.graph.layers import Border, layer_borders
from stagepack.partition.assignment import NodeOrder, StageAssignment, assign_consecutive
from stagepack.partition.cut_options import LAYERS
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.solver import CostSequence, cost_sequence


def assign_by_layers(costed: CostedGraph, order: NodeOrder) -> StageAssignment:
    """Start a stage between each two consecutive layers, where the least is sent. Layers that touch one state stay in one stage."""
    borders = layer_borders(costed.analysis)
    if borders is None:
        raise CutError(
            f"stages: the model has no layers for {LAYERS!r}: expected modules such as layers.0 and layers.1, in an nn.ModuleList or "
            "nn.Sequential, of which each uses what the one before it gave, or equal runs of operators: pass stages=N or split_at"
        )
    if len(borders) >= limits.STAGES:
        raise CutError(f"stages: expected at most {limits.STAGES}, found {len(borders) + 1} layers: pass stages=N")
    sequence = cost_sequence(costed, order)
    sending_times = _sending_times(sequence)
    legal_positions = set(sequence.split_positions)
    starts: set[int] = set()
    for border in borders:
        legal = [position for position in _positions(order, border) if position in legal_positions]
        if legal:
            starts.add(min(legal, key=sending_times.__getitem__))
    if borders and not starts:
        group = max(costed.analysis.colocation_groups, key=lambda group: group.nodes[-1] - group.nodes[0])
        raise CutError(
            f"stages: {group.name!r} is written, so all operators that touch it must stay in one stage, but they are in several layers: no "
            f"cut between two of the {len(borders) + 1} layers is possible: keep the state of each layer in the layer, or pass stages=N"
        )
    return assign_consecutive(order, sorted(starts))


def _positions(order: NodeOrder, border: Border) -> Iterator[int]:
    """The positions that separate the nodes of two layers as a cut of the execution order would, or nearly so: the order moves nodes."""
    numbers = sorted(range(border.start, border.end), key=order.positions.__getitem__)
    for place in border.node_numbers:
        # By the number of nodes in front of the cut: the nodes on the other side than in the execution order.
        misplaced = list(itertools.accumulate((1 if number >= place else -1 for number in numbers), initial=0))
        least = min(misplaced)
        for count in range(len(numbers) - 1, 0, -1):
            if misplaced[count] == least:
                yield from range(order.positions[numbers[count]], order.positions[numbers[count - 1]], -1)


def _sending_times(sequence: CostSequence) -> Sequence[int]:
    """For each position, the time to send what a cut there sends."""
    changes = [0] * (len(sequence.times) + 1)
    for value in sequence.transfers:
        changes[value.producer + 1] += value.cost
        changes[value.users[-1] + 1] -= value.cost
    return list(itertools.accumulate(changes))
