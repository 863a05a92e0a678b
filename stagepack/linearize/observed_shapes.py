"""Shapes that a program states wrongly at some of its sizes, such as that of ``x[:, -n:]`` where n is 0: they get symbols of their own."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from stagepack.format.graph import Graph, Node, Value
from stagepack.format.shapes import Dim, Guard, Symbol, evaluate_dim, guard_holds, size_in_range
from stagepack.linearize.size_trial import Observed, Point, SizeTrial, Verdict

# How many nodes run without data in all, about a fifth of a millisecond each.
_MAX_NODES: Final = 2_000
# The largest size that is tried without data, and that where operators are traced step by step, such as recurrent layers.
_LARGEST_SIZE, _LARGEST_STEPS = 2**31, 64
_STEPWISE: Final = ("aten.lstm", "aten.gru", "aten.rnn_", "higher_order.")
# How far below the upper end a size is looked for that satisfies all guards.
_MAX_STEPS_DOWN: Final = 64

# A dimension of a value, by its name and its axis; the axis is None for a symbolic integer.
_ValueAxis = tuple[str, int | None]


def observations(trial: SizeTrial, graph: Graph, guards: Sequence[Guard]) -> list[Observed]:
    """Return what runs at sizes that a program admits have found other than its graph states."""
    symbols = {symbol.name: symbol for symbol in graph.symbols}

    def is_admitted(point: Point) -> bool:
        in_range = all(size_in_range(symbols[symbol_name], size) for symbol_name, size in point.items())
        return in_range and all(guard_holds(guard, point) for guard in guards)

    tried = [
        (point, outcome.observed)
        for point, outcome in trial.outcomes
        if outcome.verdict is Verdict.EQUAL and is_admitted(point)
    ]
    known_points = [point for point, _ in tried]
    ranges = [symbols[symbol.name] for symbol in trial.symbols]
    ends = _ends(trial.example, ranges, guards, is_stepwise=_is_stepwise(graph))
    points = [point for point in ends if is_admitted(point) and point not in known_points]
    affordable_points = points[: max(1, _MAX_NODES // max(len(graph.nodes), 1))]
    return [*(observed for _, observed in tried), *map(trial.shapes_at, affordable_points)]


def _is_stepwise(graph: Graph) -> bool:
    return any(op.name.startswith(_STEPWISE) for op in graph.ops)


def _ends(example: Point, symbols: Sequence[Symbol], guards: Sequence[Guard], *, is_stepwise: bool) -> Iterator[Point]:
    """The ends of the ranges: all upper ones, all lower ones, then each alone."""
    if not symbols:
        return
    limit = _LARGEST_STEPS if is_stepwise else _LARGEST_SIZE
    lower = {symbol.name: symbol.min or 0 for symbol in symbols}
    upper = {symbol.name: _largest(symbol, example, guards, limit) for symbol in symbols}
    yield upper
    yield lower
    if len(symbols) > 1:
        for ends in (lower, upper):
            yield from ({**example, symbol_name: size} for symbol_name, size in ends.items())


def _largest(symbol: Symbol, example: Point, guards: Sequence[Guard], limit: int) -> int:
    """The largest size of a symbol, alone, for which all guards hold; that of the example if none is near the end."""
    known_size = example[symbol.name]
    # Without an upper end, a prime number that no code is likely to name.
    end = max(min(symbol.max if symbol.max is not None else 1_009, limit), known_size)
    sizes = range(end, max(end - _MAX_STEPS_DOWN, known_size), -1)
    fits = (size for size in sizes if all(guard_holds(guard, {**example, symbol.name: size}) for guard in guards))
    return next(fits, known_size)


def with_observed_shapes(graph: Graph, observed: Sequence[Observed]) -> Graph:
    """Return a graph with a symbol in the place of each dimension that was observed otherwise than it is stated.

    Dimensions that are stated alike, and were observed alike in all runs, have one symbol.
    """
    wrong_sizes: dict[_ValueAxis, tuple[int | None, ...]] = {}
    for value_axis in itertools.chain.from_iterable(observed):
        wrong_sizes.setdefault(value_axis, tuple(differences.get(value_axis) for differences in observed))
    if not wrong_sizes:
        return graph
    sizes = {symbol.name: symbol.example for symbol in graph.symbols if symbol.example is not None}
    taken_names = {symbol.name for symbol in graph.symbols}
    free_names = (free_name for index in itertools.count() if (free_name := f"s{index}") not in taken_names)
    added: dict[tuple[Dim, tuple[int | None, ...]], Symbol] = {}

    def observed_dim(value: Value, axis: int) -> Dim:
        observed_sizes = wrong_sizes.get((value.name, axis))
        dim = value.shape[axis]
        if observed_sizes is None:
            return dim
        if (dim, observed_sizes) not in added:
            added[dim, observed_sizes] = Symbol(name=next(free_names), example=_example_size(dim, sizes))
        return added[dim, observed_sizes].name

    def observed_value(value: Value | None) -> Value | None:
        if value is None:
            return None
        expr = None if (value.name, None) in wrong_sizes else value.expr
        return replace(value, expr=expr, shape=tuple(observed_dim(value, axis) for axis in range(len(value.shape))))

    def observed_node(node: Node) -> Node:
        return replace(node, outputs=tuple(map(observed_value, node.outputs)))

    nodes = tuple(map(observed_node, graph.nodes))
    return replace(graph, nodes=nodes, symbols=(*graph.symbols, *added.values()))


def _example_size(dim: Dim, sizes: Point) -> int | None:
    try:
        return evaluate_dim(dim, sizes)
    except (KeyError, ArithmeticError):
        return None
