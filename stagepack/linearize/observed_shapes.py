"""What a captured program makes of the shapes that its graph states, node by node, at sizes other than the sizes of its example.

Shapes that it states wrongly at some of them, such as the shape of ``x[:, -n:]`` where n is 0, get symbols of their own.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from msgspec.structs import replace
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode

from stagepack.argument_guards import guarded_operator
from stagepack.capture.program_run import run_program_nodes
from stagepack.format.graph import Graph, Node, Value
from stagepack.format.shapes import Dim, Symbol, known_size
from stagepack.linearize.op_tables import context_module_position, opens_context
from stagepack.linearize.program import LinearizedProgram
from stagepack.torch_internals import OperatorOverload

# The size of each symbol of the inputs, by name.
Point = Mapping[str, int]
# A dimension of a value, by its name and its axis; the axis is None for a symbolic integer.
_ValueAxis = tuple[str, int | None]
# The sizes that a run found other than the graph states them.
Observed = dict[_ValueAxis, int]
# The result of a node that cannot run on tensors without data, or that uses an unknown result.
_UNKNOWN: Final = object()


class UnsafeArgumentsError(Exception):
    """An operator would end the process with its arguments."""


class RankError(Exception):
    """A value has another number of dimensions than the graph states, such as the result of ``squeeze`` at size 1."""


class ObservedRun:
    """A run of a program at some sizes. `observed` has the sizes that were found other than the graph states them.

    Nodes that fail are left out if `skips_failing`, and those that use what these return: on tensors without data, some need data.
    """

    def __init__(self, program: LinearizedProgram, point: Point, *, skips_failing: bool = False) -> None:
        self.observed: Observed = {}
        self.skips_failing = skips_failing
        self._program = program
        self._point = point
        self._node_positions = {source: position for position, source in enumerate(program.sources)}

    def run(self, weights: Mapping[str, torch.Tensor], values: Sequence[Any]) -> list[Any]:
        """Run the program, without its guards on the sizes of inputs; return the leaves of its answer."""
        exported = self._program.exported
        return run_program_nodes(exported, values, weights, _ObservingInterpreter(exported.graph_module, self))

    def observe(self, source: FxNode, result: Any) -> None:
        """Compare what a node returned with the shapes that the graph states; sizes that depend on data are left out."""
        position = self._node_positions.get(source)
        if position is None:
            return
        node = self._program.graph.nodes[position]
        for value, item in zip(node.outputs, result if node.unpack else [result], strict=False):
            if value is not None:
                self._observe_value(value, item)

    def _observe_value(self, value: Value, item: Any) -> None:
        for axis, dim, size in _stated_sizes(value, item):
            if known_size(dim, self._point) not in (None, size):
                self.observed[value.name, axis] = size


def _stated_sizes(value: Value, item: Any) -> list[tuple[int | None, Dim, int]]:
    """The axis, the dimension as the graph states it, and the size of each dimension of a value."""
    if not isinstance(item, torch.Tensor):
        return [(None, value.expr, item)] if type(item) is int and value.expr is not None else []
    if item.ndim != len(value.shape):
        raise RankError(f"a value has another number of dimensions: {item.ndim}, and {len(value.shape)} in the example")
    return [(axis, dim, size) for axis, (dim, size) in enumerate(zip(value.shape, item.shape, strict=True))]


class _ObservingInterpreter(Interpreter):
    """Runs a graph module, and those that it calls under another grad mode or autocast."""

    def __init__(self, module: GraphModule, observer: ObservedRun) -> None:
        super().__init__(module)
        self._observer = observer

    def run_node(self, n: FxNode) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        skips_failing = self._observer.skips_failing
        if skips_failing and any(self.env[used] is _UNKNOWN for used in n.all_input_nodes):
            return _UNKNOWN
        try:
            result = self._run_in_context(n) if opens_context(n) else super().run_node(n)
            if result is not _UNKNOWN:
                self._observer.observe(n, result)
        except Exception:
            if not skips_failing:
                raise
            return _UNKNOWN
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Checks may look at data, which tensors that may be left out do not have.
        is_checked = isinstance(target, OperatorOverload) and not self._observer.skips_failing
        if not is_checked or guarded_operator(target) is target:
            return super().call_function(target, args, kwargs)
        try:
            return guarded_operator(target)(*args, **kwargs)
        except ValueError as error:
            raise UnsafeArgumentsError(f"{target}: {error}") from error

    def _run_in_context(self, node: FxNode) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        position = context_module_position(node)
        called = _ObservingInterpreter(args[position], self._observer)
        args = (*args[:position], lambda *inputs: called.run(*inputs), *args[position + 1 :])
        return node.target(*args, **kwargs)  # type: ignore[operator]


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
            added[dim, observed_sizes] = Symbol(name=next(free_names), example=known_size(dim, sizes))
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
