"""What need not be sent: values that are cheaper to compute again where they are used, and tensors that are asked for sizes alone.

Masks, rotary tables and position ids are cheaper to compute again. What is written in place is computed again as a whole, with all nodes of
its colocation group.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph, Node, Value, value_bytes
from stagepack.format.operators import operator_namespace, without_overload
from stagepack.format.shapes import Dim, example_sizes, symbol_names
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.rows.operator_rules import METADATA
from stagepack.partition.assignment import NodeOrder
from stagepack.partition.costs import GraphCosts, memory_time, transfer_time

# Prefixes of operators that return uninitialized memory.
_UNINITIALIZED = ("empty", "new_empty", "resize")
_PURE_NAMESPACES = ("aten", "prims")
# Namespaces of arithmetic on symbolic scalars.
SCALAR_NAMESPACES = ("operator", "math", "torch")
_SCALAR_ASSERTION = "aten._assert_scalar.default"
# Nodes that are computed again for one value, at most.
_MOST_NODES = 64
# Sizes that may change count as at least this.
_LARGE_SIZE = 512
# Bytes of weights that a second stage may hold for one value, at most; and no more than the value has at the example's sizes.
_MOST_DUPLICATED_BYTES = 2**20
# A node with more FLOPs for each byte of its results is not cheap, however small its result.
_CHEAP_FLOPS_PER_BYTE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to compute a value: the nodes to compute again, and the inputs of the model and weights that they use, by name."""

    nodes: frozenset[int] = frozenset()
    inputs: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()


def recomputation_recipes(analysis: GraphAnalysis, costs: GraphCosts) -> dict[str, Recipe]:
    """Find the values that are cheaper to compute again than to send.

    Costs are compared at large sizes of the dimensions that may change: examples are small, and a mask outgrows what it is made of.
    A value that is made of weights and sizes alone is the same in every call, so it is never sent. Kernels are chosen by more than
    values: a view of a parameter requires a gradient (``at::matmul`` asks for it), which a value that was sent does not.
    """
    return _RecipeSearch(analysis, costs).run()


class _RecipeSearch:
    def __init__(self, analysis: GraphAnalysis, costs: GraphCosts) -> None:
        graph, classes = analysis.graph, analysis.alias_classes
        self._analysis = analysis
        self._costs = costs
        self._large_costs = _LargeCosts(analysis, costs)
        self._unknown_sizes = {symbol.name for symbol in graph.symbols if symbol.example is None}
        self._scalars = {value.name for value in analysis.values.values() if value.dtype in SCALAR_DTYPES}
        # The recipes of all values that can be computed again, whether that is cheaper or not.
        recipes = {value.name: Recipe(inputs=frozenset({value.name})) for value in graph.inputs}
        recipes |= {weight.value: Recipe(weights=frozenset({weight.value})) for weight in graph.weights}
        self._recipes = {
            value_name: recipe for value_name, recipe in recipes.items() if not classes.is_written(value_name)
        }

    def run(self) -> dict[str, Recipe]:
        """The recipes of the values that are cheaper to compute again."""
        cheaper: dict[str, Recipe] = {}
        for node_numbers in _node_groups(self._analysis):
            recipe = self._recipe(node_numbers)
            if recipe is not None:
                for value_name in self._analysis.defined_by(node_numbers):
                    self._recipes[value_name] = recipe
                    if value_name not in self._scalars and self._is_cheaper(value_name, recipe):
                        cheaper[value_name] = recipe
        return cheaper

    def _recipe(self, node_numbers: Sequence[int]) -> Recipe | None:
        """How to compute the results of nodes that are computed together; None when they should not be computed again."""
        graph = self._analysis.graph
        nodes = [graph.nodes[node_number] for node_number in node_numbers]
        result_names = self._analysis.defined_by(node_numbers)
        source_names = self._analysis.used_by(node_numbers).keys() - result_names.keys() - self._scalars
        if not self._recipes.keys() >= source_names or not all(_is_pure(graph, node) for node in nodes):
            return None
        if self._has_unknown_size([self._analysis.values[value_name] for value_name in result_names]):
            return None
        result_bytes = sum(self._costs.value_bytes[value_name] for value_name in result_names)
        if sum(node.cost.flops for node in nodes) > _CHEAP_FLOPS_PER_BYTE * result_bytes:
            return None
        sources = [self._recipes[value_name] for value_name in source_names]
        all_nodes = frozenset(node_numbers).union(*(source.nodes for source in sources))
        if len(all_nodes) > _MOST_NODES:
            return None
        return Recipe(
            nodes=all_nodes,
            inputs=frozenset[str]().union(*(source.inputs for source in sources)),
            weights=frozenset[str]().union(*(source.weights for source in sources)),
        )

    def _has_unknown_size(self, values: Sequence[Value]) -> bool:
        """Whether a size depends on data, so that it would have to be computed from the data."""
        if not self._unknown_sizes:
            return False
        sizes = (symbol_name for value in values for dim in value.shape for symbol_name in symbol_names(dim))
        return not self._unknown_sizes.isdisjoint(sizes)

    def _is_cheaper(self, value_name: str, recipe: Recipe) -> bool:
        if not recipe.inputs:
            return True
        duplicated_bytes = sum(self._costs.weight_bytes[weight] for weight in recipe.weights)
        if duplicated_bytes > min(self._costs.value_bytes[value_name], _MOST_DUPLICATED_BYTES):
            return False
        return self._large_costs.recipe_time(recipe) < transfer_time(self._large_costs.bytes_by_name[value_name])


def _node_groups(analysis: GraphAnalysis) -> list[tuple[int, ...]]:
    """The nodes in order, each alone, but colocation groups as one, at the position of their last node.

    Nodes of several groups, and of groups for weights and inputs of the model, are left out.
    """
    graph, groups = analysis.graph, analysis.colocation_groups
    outside_names = {weight.names[0] for weight in graph.weights} | {value.name for value in graph.inputs}
    group_counts = Counter(node_number for group in groups for node_number in group.nodes)
    by_last_node: dict[int, tuple[int, ...]] = {
        node_number: (node_number,) for node_number in range(len(graph.nodes)) if node_number not in group_counts
    }
    for group in groups:
        if group.name not in outside_names and all(group_counts[node_number] == 1 for node_number in group.nodes):
            by_last_node[group.nodes[-1]] = group.nodes
    return [by_last_node[node_number] for node_number in sorted(by_last_node)]


def _is_pure(graph: Graph, node: Node) -> bool:
    """Whether a node returns the same tensors whenever and wherever it runs, and only writes values of its colocation group."""
    op = graph.ops[node.op]
    namespace, _, base_name = op.name.partition(".")
    if namespace not in _PURE_NAMESPACES or op.random or base_name.startswith(_UNINITIALIZED):
        return False
    return all(value is None or value.dtype not in SCALAR_DTYPES for value in node.outputs)


def find_size_nodes(analysis: GraphAnalysis) -> frozenset[int]:
    """Find the nodes that ask tensors for sizes, strides or dtypes alone, compute with sizes, or make views that only such nodes use.

    Nodes that write memory, or stay with those that do, are not among them.
    """
    graph = analysis.graph
    fixed_nodes = {node_number for group in analysis.colocation_groups for node_number in group.nodes}
    fixed_nodes.update(*analysis.alias_classes.writers.values())
    read_names = set(graph.outputs)
    size_nodes: set[int] = set()
    for node_number in reversed(range(len(graph.nodes))):
        op_name, result_names = graph.ops[graph.nodes[node_number].op].name, analysis.node_outputs[node_number]
        asks_for_sizes = (
            without_overload(op_name) in METADATA
            or operator_namespace(op_name) in SCALAR_NAMESPACES
            or op_name == _SCALAR_ASSERTION
            or (result_names and read_names.isdisjoint(result_names) and _is_view(graph, graph.nodes[node_number]))
        )
        if asks_for_sizes and node_number not in fixed_nodes:
            size_nodes.add(node_number)
        else:
            read_names.update(analysis.node_inputs[node_number])
    return frozenset(size_nodes)


def _is_view(graph: Graph, node: Node) -> bool:
    """Whether a node moves elements at most."""
    return not node.cost.flops and _is_pure(graph, node)


class _LargeCosts:
    """Costs where the dimensions that may change are large."""

    def __init__(self, analysis: GraphAnalysis, costs: GraphCosts) -> None:
        symbols = analysis.graph.symbols
        sizes = {symbol_name: max(size, _LARGE_SIZE) for symbol_name, size in example_sizes(symbols).items()}
        for symbol in symbols:
            if symbol.max is not None:
                sizes[symbol.name] = min(sizes[symbol.name], symbol.max)
        self._graph = analysis.graph
        self._moved_bytes: dict[int, int] = {}
        # Bytes of all inputs, weights and values.
        self.bytes_by_name: Mapping[str, int] = {
            **{value_name: value_bytes(value, sizes) for value_name, value in analysis.values.items()},
            **costs.weight_bytes,
        }

    def recipe_time(self, recipe: Recipe) -> int:
        """Picoseconds to compute a value: its nodes move memory, and the inputs and weights that they use count as sent."""
        fetched_bytes = sum(self.bytes_by_name[value_name] for value_name in recipe.inputs | recipe.weights)
        return memory_time(sum(map(self._node_bytes, recipe.nodes))) + transfer_time(fetched_bytes)

    def _node_bytes(self, node_number: int) -> int:
        """Bytes that a node reads and writes."""
        if node_number not in self._moved_bytes:
            node = self._graph.nodes[node_number]
            moved_values = (*input_names(node), *output_names(node))
            self._moved_bytes[node_number] = sum(self.bytes_by_name[value_name] for value_name in moved_values)
        return self._moved_bytes[node_number]


@dataclass(frozen=True, eq=False, kw_only=True)
class CostedGraph:
    """The graph of a whole model with its costs; what follows from them is computed at its first use and kept."""

    analysis: GraphAnalysis
    costs: GraphCosts

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.analysis.graph

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """How to compute the values that are cheaper to compute again than to send, by name."""
        return recomputation_recipes(self.analysis, self.costs)

    @cached_property
    def size_nodes(self) -> frozenset[int]:
        """The numbers of the nodes that ask for sizes alone: a stage receives no tensor for them if another stage can run them."""
        return find_size_nodes(self.analysis)

    def content_nodes(self, node_numbers: Iterable[int]) -> list[int]:
        """Return the nodes among some that use more of tensors than their sizes."""
        return [node_number for node_number in node_numbers if node_number not in self.size_nodes]

    @cached_property
    def received_names(self) -> Sequence[tuple[str, ...]]:
        """For each node, the values that its stage receives for it, unless it has them. A value used for its size alone is not received.

        But the first node that uses the size of an input of the model receives the input, if no node before it has used the input, nor
        another one that has the size.
        """
        analysis, input_names = self.analysis, {value.name for value in self.graph.inputs}
        sources: dict[str, frozenset[str]] = {}  # the inputs that a size is read off
        seen_inputs: set[str] = set()
        seen_dims: set[Dim | None] = set()
        received: list[tuple[str, ...]] = []
        for node_number, used_names in enumerate(analysis.node_inputs):
            if node_number in self.size_nodes:
                own_sources = frozenset(used_names) & input_names
                own_sources = own_sources.union(*(sources.get(value_name, ()) for value_name in used_names))
                sources |= dict.fromkeys(analysis.node_outputs[node_number], own_sources)
                received.append(())
                continue
            sizes = sources.keys() & set(used_names)
            sized_inputs = frozenset[str]().union(
                *(sources[size] for size in sizes if analysis.values[size].expr not in seen_dims)
            )
            received.append((*used_names, *sorted(sized_inputs - seen_inputs - set(used_names))))
            new_inputs = input_names.intersection(received[-1]) - seen_inputs
            seen_inputs |= new_inputs
            seen_dims.update(*(analysis.values[value_name].shape for value_name in new_inputs))
        return received

    @cached_property
    def sent_values(self) -> frozenset[str]:
        """The values that a stage receives when it uses them and does not produce them; symbolic scalars are not counted."""
        return frozenset(
            value.name
            for value in self.analysis.values.values()
            if value.name not in self.recipes and value.dtype not in SCALAR_DTYPES
        )


def activation_bytes(analysis: GraphAnalysis, costs: GraphCosts, order: NodeOrder) -> list[int]:
    """Compute the memory of the values, no weights, that are alive while each node runs; of those that may share memory, the largest."""
    graph, representative = analysis.graph, analysis.alias_classes.representative
    births = [(0, value.name) for value in graph.inputs]
    last_uses: dict[str, int] = {}
    for position, node_number in enumerate(order.node_numbers):
        births += ((position, value_name) for value_name in analysis.node_outputs[node_number])
        for value_name in analysis.node_inputs[node_number]:
            last_uses[value_name] = position
    last_uses |= dict.fromkeys(graph.outputs, len(graph.nodes))
    first_position: dict[str, int] = {}
    last_position: dict[str, int] = {}
    memory_bytes: dict[str, int] = {}
    for position, value_name in births:
        memory = representative(value_name)
        if memory not in costs.weight_bytes:
            first_position.setdefault(memory, position)
            last_position[memory] = max(last_uses.get(value_name, position), last_position.get(memory, 0))
            memory_bytes[memory] = max(costs.value_bytes[value_name], memory_bytes.get(memory, 0))
    changes = [0] * (len(graph.nodes) + 2)
    for memory, position in first_position.items():
        changes[position] += memory_bytes[memory]
        changes[last_position[memory] + 1] -= memory_bytes[memory]
    return list(itertools.accumulate(changes[: len(graph.nodes)]))
