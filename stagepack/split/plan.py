"""`stages=N`: cut into N consecutive stages so that the heaviest holds few weight bytes.

It holds at most a sixteenth more than the best cut's heaviest stage. Within that bound the most even cut is taken, with a
preference for few values crossing: an exact minimum would tear a layer apart for a few bytes.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from stagepack.errors import CutError
from stagepack.format.graph import Graph
from stagepack.format.walk import values_made, values_used
from stagepack.split.bonds import bonds


def balanced(graph: Graph, stages: int, stored_bytes: Mapping[str, int]) -> list[int]:
    """Positions of the cuts: each is the number of the node that starts the next stage.

    `stored_bytes` gives the size of each stored tensor in bytes. Where there are fewer places to cut at than asked for, the
    last stages are empty: their positions are the end of the graph.

    Raises:
        CutError: `stages` is less than 1.
    """
    if stages < 1:
        raise CutError(f"stages: expected at least 1, found {stages}")
    every = _places(graph, stored_bytes)
    places = _best_by_weight(every)
    if len(places) - 1 < stages:
        places = every
    filled = max(1, min(stages, len(places) - 1))
    least = _least_ceiling([place.before for place in places], filled)
    return _best(places, filled, least + least // _SLACK) + [len(graph.nodes)] * (stages - filled)


_SLACK = 16  # the heaviest stage may exceed the least possible by one part in this many
_CROSSING = 0.02  # what a value that crosses costs, where a stage of even weight costs 1


@dataclass(frozen=True, slots=True)
class _Place:
    position: int
    before: int  # bytes of the weights whose first use stands before the place
    crossing: int  # values that cross it


def _places(graph: Graph, stored_bytes: Mapping[str, int]) -> list[_Place]:
    """The places where a cut tears no bond, with both ends of the graph; a graph without weights weighs one byte a node."""
    last_use: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        last_use.update(dict.fromkeys(values_used(node), number))
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    stored = {weight.value: weight.stored for weight in graph.weights}
    weightless = not any(stored_bytes.values())
    forbidden: set[int] = set()
    for bond in bonds(graph):
        forbidden.update(range(bond.nodes[0] + 1, bond.nodes[-1] + 1))
    live: dict[str, int] = {}
    seen: set[str] = set()
    total = 0
    places = [_Place(0, 0, 0)]
    for number, node in enumerate(graph.nodes):
        if number and number not in forbidden:
            live = {name: use for name, use in live.items() if use >= number}
            places.append(_Place(number, total, len(live)))
        fresh = {stored[name] for name in values_used(node) if name in stored} - seen
        seen |= fresh
        total += 1 if weightless else sum(stored_bytes[name] for name in fresh)
        live.update({name: last_use.get(name, -1) for name in values_made(node)})
    return [*places, _Place(len(graph.nodes), total, 0)] if graph.nodes else places


def _best_by_weight(places: list[_Place]) -> list[_Place]:
    """Of the places between which no weight comes up, the last one with the fewest crossings; both ends stay."""
    best: dict[int, _Place] = {}
    for place in places[1:-1]:
        known = best.get(place.before)
        if known is None or place.crossing <= known.crossing:
            best[place.before] = place
    inner = [place for place in best.values() if 0 < place.before < places[-1].before]
    return [places[0], *inner, places[-1]]


def _least_ceiling(before: list[int], stages: int) -> int:
    """The least bytes that the heaviest of `stages` parts can have, by bisection."""
    low, high = 0, before[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(before, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return high


def _parts_needed(before: list[int], ceiling: int) -> float:
    parts, start = 1, before[0]
    for here, after in itertools.pairwise(before):
        if after - here > ceiling:
            return math.inf
        if after - start > ceiling:
            parts, start = parts + 1, here
    return parts


def _best(places: list[_Place], stages: int, ceiling: int) -> list[int]:
    """Cut into exactly `stages` parts of at most `ceiling` bytes at the least cost (dynamic programming over the places).

    A part costs the square of its share of the bytes, 1 when it has its even share, and each value that crosses costs a
    little, so that of cuts about as even the one at the end of a layer is taken.
    """
    even = max(1, places[-1].before) / stages
    least: list[float] = [0.0] + [math.inf] * (len(places) - 1)
    choice: list[list[int]] = []
    for _ in range(stages):
        following: list[float] = [math.inf] * len(places)
        come_from = [0] * len(places)
        for end in range(1, len(places)):
            for start in range(end - 1, -1, -1):
                size = places[end].before - places[start].before
                if size > ceiling:
                    break
                cost = least[start] + (size / even) ** 2 + _CROSSING * places[end].crossing
                if cost < following[end]:
                    following[end], come_from[end] = cost, start
        least = following
        choice.append(come_from)
    cuts = []
    here = len(places) - 1
    for come_from in reversed(choice[1:]):
        here = come_from[here]
        cuts.append(places[here].position)
    return cuts[::-1]
