"""Inputs of other sizes than the example, made of its values: at the ends of the ranges of a bundle, and between them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.graph import Graph, Value, value_bytes
from stagepack.format.operators import unsafe_operators
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Guard, Symbol, evaluate_dim, guard_holds, size_in_range, symbol_names
from stagepack.format.traversal import input_names, output_names

# How many sizes are tried at most, and up to which one: larger ones take long and show nothing else.
_MAX_CHOICES: Final = 20
_MAX_SIZE: Final = 257
# Bytes of all values of a call. With less than twice the bytes of the example, a larger size takes little time.
_MAX_BYTES: Final = 1 << 25
# Operations of a call: a kernel of a convolution that is 64 times as wide and as high takes minutes, and few bytes.
_MAX_FLOPS: Final = 1 << 30
# How far from a size another one is looked for that fits the conditions of the bundle, and how many combinations are tried.
_MAX_DISTANCE: Final = 64
_MAX_COMBINATIONS: Final = 2000

Sizes = dict[str, int]


def sizes_to_check(bundle: Bundle) -> list[Sizes]:
    """Return other sizes of the symbols of a bundle than the sizes of the example: ends of ranges, primes, 1, and 0 where it is allowed.

    All of them satisfy the conditions of the bundle, and make values that are not many times larger than the example's.
    """
    symbols = [symbol for symbol in bundle.entry_point.symbols if symbol.example is not None]
    example = {symbol.name: symbol.example for symbol in symbols if symbol.example is not None}
    graphs = [bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]
    call_work = _CallWork(graphs, example)
    checked_sizes: list[Sizes] = []
    for target_sizes in _interesting_sizes(symbols, example):
        sizes = _fitting_sizes(symbols, bundle.entry_point.guards, target_sizes)
        while sizes is not None and call_work.exceeds_budget(sizes):
            target_sizes = {
                symbol_name: max(size // 2, min(size, example[symbol_name]))
                for symbol_name, size in target_sizes.items()
            }
            smaller_sizes = _fitting_sizes(symbols, bundle.entry_point.guards, target_sizes)
            sizes = None if smaller_sizes == sizes else smaller_sizes
        if sizes is not None and sizes != example and sizes not in checked_sizes:
            checked_sizes.append(sizes)
    return checked_sizes[:_MAX_CHOICES]


def inputs_at(bundle: Bundle, example_inputs: Mapping[str, Any], sizes: Sizes) -> list[dict[str, Any]]:
    """Return inputs of other sizes, made of the inputs of the example: the choices that fit the contract of the bundle, by edge name.

    Tensors are cut, or their values repeated; repeated values that are no integers are a little smaller, so that they differ. Integers may
    be positions in a dimension that is smaller now, so that there is a second choice, in which they are below all sizes.
    """
    # max_pool2d_with_indices_backward writes past the end of its result where an index is out of range.
    if unsafe_operators(bundle.graph(stage_number) for stage_number in range(len(bundle.stages))):
        return []
    choices: list[dict[str, Any]] = []
    below = max(min(sizes.values(), default=1) - 1, 0)
    for is_clamped in (False, True):
        inputs: dict[str, Any] = {}
        try:
            for edge in bundle.entry_point.inputs:
                value = example_inputs[edge.name]
                if isinstance(value, torch.Tensor):
                    resized = _resized(value, [evaluate_dim(dim, sizes) for dim in edge.shape])
                    inputs[edge.name] = resized.clamp(max=below) if is_clamped and _has_integers(resized) else resized
                else:
                    inputs[edge.name] = value if edge.expr is None else evaluate_dim(edge.expr, sizes)
            bound = {edge_name: BoundArgument(edge_name, value) for edge_name, value in inputs.items()}
            check_values(bundle.entry_point.inputs, bound, bundle.entry_point.symbols, bundle.entry_point.guards)
        except (InputError, KeyError, ArithmeticError, RuntimeError, IndexError):
            continue
        if not any(_are_equal(inputs, choice) for choice in choices):
            choices.append(inputs)
    return choices


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as text, such as ``rows = 7, length = 0``."""
    return ", ".join(f"{symbol_name} = {size}" for symbol_name, size in sizes.items())


def call_bytes(graphs: Iterable[Graph], sizes: Mapping[str, int]) -> int:
    """Return the bytes of all values of a call at some sizes."""
    return sum(value_bytes(value, sizes) for graph in graphs for value in (*graph.inputs, *_node_outputs(graph)))


def _interesting_sizes(symbols: Sequence[Symbol], example: Sizes) -> Iterator[Sizes]:
    """Yield sizes that are of interest, in the order of their interest. They need not satisfy the conditions."""
    chosen = {symbol.name: _chosen_sizes(symbol) for symbol in symbols}
    for kind in ("lowest", "highest", "prime", "one", "zero"):
        yield {symbol_name: sizes[kind] for symbol_name, sizes in chosen.items()}
    primes = itertools.cycle((7, 3, 11, 5, 13, 2))
    yield {symbol_name: next(primes) for symbol_name in chosen}
    if len(symbols) > 1:
        for kind in ("zero", "one", "prime", "highest", "lowest"):
            for symbol_name in chosen:
                yield example | {symbol_name: chosen[symbol_name][kind]}


def _chosen_sizes(symbol: Symbol) -> Mapping[str, int]:
    assert symbol.example is not None
    lowest = max(symbol.min or 0, 0)
    highest = max(_MAX_SIZE, symbol.example)
    highest = highest if symbol.max is None else min(highest, symbol.max)
    prime = next(size for size in itertools.count(symbol.example + 1) if _is_prime(size))
    sizes = {"lowest": lowest, "highest": highest, "prime": prime, "one": 1, "zero": 0}
    return {kind: min(max(size, lowest), highest) for kind, size in sizes.items()}


def _is_prime(size: int) -> bool:
    return size > 1 and all(size % divisor for divisor in range(2, int(size**0.5) + 1))


def _fitting_sizes(symbols: Sequence[Symbol], guards: Sequence[Guard], target_sizes: Sizes) -> Sizes | None:
    """The sizes near to others that satisfy all ranges and conditions; None if none were found."""
    combinations_left = _MAX_COMBINATIONS

    def extend(sizes: Sizes, remaining: Sequence[Symbol]) -> Sizes | None:
        nonlocal combinations_left
        if not all(guard_holds(guard, sizes) for guard in guards):
            return None
        if not remaining:
            return sizes
        symbol = remaining[0]
        for distance in range(_MAX_DISTANCE):
            for size in dict.fromkeys((target_sizes[symbol.name] + distance, target_sizes[symbol.name] - distance)):
                combinations_left -= 1
                if combinations_left < 0:
                    return None
                if size >= 0 and size_in_range(symbol, size):
                    extended_sizes = extend(sizes | {symbol.name: size}, remaining[1:])
                    if extended_sizes is not None:
                        return extended_sizes
        return None

    return extend({}, symbols)


class _CallWork:
    """What a call takes at other sizes than those of the example."""

    def __init__(self, graphs: Sequence[Graph], example: Sizes) -> None:
        self._example = example
        self._graphs = graphs
        self._max_bytes = max(2 * call_bytes(graphs, example), _MAX_BYTES)
        # The operations of each node at the example, and the symbols that they grow with.
        self._flops = [flops for graph in graphs for flops in _symbols_of_flops(graph)]
        self._max_flops = max(2 * self._flops_at(example), _MAX_FLOPS)

    def exceeds_budget(self, sizes: Sizes) -> bool:
        return call_bytes(self._graphs, sizes) > self._max_bytes or self._flops_at(sizes) > self._max_flops

    def _flops_at(self, sizes: Sizes) -> float:
        return sum(
            flops * math.prod(self._growth(symbol_name, sizes) for symbol_name in grown_symbols)
            for flops, grown_symbols in self._flops
        )

    def _growth(self, symbol_name: str, sizes: Sizes) -> float:
        return max(sizes[symbol_name], 1) / max(self._example[symbol_name], 1) if symbol_name in sizes else 1


def _node_outputs(graph: Graph) -> Iterator[Value]:
    return (value for node in graph.nodes for value in node.outputs if value is not None)


def _symbols_of_flops(graph: Graph) -> Iterator[tuple[int, set[str]]]:
    """The operations of each node at the example, and the symbols of what it takes and returns."""
    symbols_of_value = {
        value.name: {symbol_name for dim in value.shape for symbol_name in symbol_names(dim)}
        for value in (*graph.inputs, *_node_outputs(graph))
    }
    for node in graph.nodes:
        if node.cost.flops:
            value_names = [*input_names(node), *output_names(node)]
            yield node.cost.flops, set().union(*(symbols_of_value.get(value_name, ()) for value_name in value_names))


def _resized(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of another shape with the values of a tensor."""
    resized = tensor.contiguous()
    for dim, size in enumerate(shape):
        if size == resized.shape[dim]:
            continue
        positions = torch.arange(size)
        repeats = positions // max(resized.shape[dim], 1)
        resized = resized.index_select(dim, positions % max(resized.shape[dim], 1))
        if resized.is_floating_point() or resized.is_complex():
            factors = 1 / (1 + repeats.to(torch.float64) / 32)
            factors = factors.reshape([-1 if index == dim else 1 for index in range(resized.dim())])
            smaller = (resized * factors).to(resized.dtype)
            # Numbers that are integers may be flags, or counts.
            resized = smaller if resized.is_complex() else torch.where(resized == resized.round(), resized, smaller)
    return resized.clone()


def _has_integers(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _are_equal(inputs: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    return all(
        torch.equal(value, choice[edge_name]) if isinstance(value, torch.Tensor) else value == choice[edge_name]
        for edge_name, value in inputs.items()
    )
