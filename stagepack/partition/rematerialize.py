"""Compute values again where they are used, when that is cheaper than to send them: masks, rotary tables, position ids, sizes.

A copy of a node is the node itself, in a second stage: joining the stages finds it at one place of the whole model and keeps
it once. What is written in place is copied as a whole, with all nodes of its bond. A size is read off a tensor that the stage
has anyway, where there is one; such a node is no copy of anything.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.graph import Argument, Graph, Node, Op, Value, ValueArg
from stagepack.format.operators import operator_namespace
from stagepack.format.shapes import symbol_names
from stagepack.format.traversal import input_names, output_names, parameter_value_names
from stagepack.graph.aliasing import alias_classes, colocation_groups
from stagepack.partition.costs import GraphCosts, memory_time
from stagepack.partition.solver import transfer_time

SYM_SIZE_OP = Op(
    name="aten.sym_size.int", schema="aten::sym_size.int(Tensor self, int dim) -> SymInt", parameters=("self", "dim")
)
_UNSET = ("empty", "new_empty", "resize")  # operators that begin so leave memory as it was
_LONGEST = 64  # nodes computed again for one value
_LARGE = 512  # what a size that may change counts as at least
_HELD_TWICE = (
    2**20
)  # bytes of weights that may be held twice for one value, and no more than it has at the example's sizes
_FLOPS_AN_ELEMENT = 4  # a node that computes more is not cheap, whatever its result weighs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNodes:
    """The nodes of one stage.

    Attributes:
        added: nodes that stand in no other stage, which run first.
        nodes: numbers of nodes of the whole graph, ascending.
    """

    added: tuple[Node, ...] = ()
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to compute a value from inputs of the model, weights and sizes: the nodes, and what they begin with."""

    nodes: frozenset[int] = frozenset()
    inputs: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()

    def __or__(self, other: "Recipe") -> "Recipe":
        """Both together."""
        return Recipe(
            nodes=self.nodes | other.nodes, inputs=self.inputs | other.inputs, weights=self.weights | other.weights
        )


def recomputation_recipes(graph: Graph, costs: GraphCosts) -> dict[str, Recipe]:
    """The values that are cheaper to compute again than to send, and how.

    That is judged where the sizes that may change are large: examples are small, and a mask outgrows what it is made of. What
    is made of weights and sizes alone is the same in every call, so it is never sent; and kernels are chosen by more than numbers:
    a view of a parameter requires a gradient (``at::matmul`` asks for it), which a value that was sent does not.
    """
    memory = alias_classes(graph)
    weigh = _Scale(graph, costs)
    known = {value.name: Recipe(inputs=frozenset({value.name})) for value in graph.inputs}
    known |= {weight.value: Recipe(weights=frozenset({weight.value})) for weight in graph.weights}
    known = {name: recipe for name, recipe in known.items() if not memory.is_written(name)}
    numbers = {value.name for value in graph.inputs if value.dtype in SCALAR_DTYPES}
    found: dict[str, Recipe] = {}
    unknown_sizes = {symbol.name for symbol in graph.symbols if symbol.example is None}
    for together in _groups(graph):
        nodes = [graph.nodes[number] for number in together]
        made = [value for node in nodes for value in node.outputs if value is not None]
        numbers.update(value.name for value in made if value.dtype in SCALAR_DTYPES)
        inside = {value.name for value in made}
        used = [name for node in nodes for name in input_names(node) if name not in numbers and name not in inside]
        if not all(_is_pure(graph, node) for node in nodes) or not all(name in known for name in used):
            continue
        from_data = any(
            symbol in unknown_sizes for value in made for dim in value.shape for symbol in symbol_names(dim)
        )
        flops = sum(node.cost.flops for node in nodes)
        cheap = flops <= _FLOPS_AN_ELEMENT * sum(costs.values[value.name] for value in made)
        if from_data or not cheap:
            continue
        recipe = Recipe(nodes=frozenset(together))
        for name in used:
            recipe |= known[name]
        if len(recipe.nodes) > _LONGEST:
            continue
        for value in made:
            known[value.name] = recipe
            held_twice = sum(costs.weights[name] for name in recipe.weights)
            fits = held_twice <= min(costs.values[value.name], _HELD_TWICE)
            cheaper = weigh.price(recipe) < transfer_time(weigh.bytes[value.name])
            if value.dtype not in SCALAR_DTYPES and (not recipe.inputs or (fits and cheaper)):
                found[value.name] = recipe
    return found


def _groups(graph: Graph) -> list[tuple[int, ...]]:
    """The nodes in order, each alone, but those together, at the place of the last one, that a bond holds together.

    Nodes of several bonds, and of those around weights and inputs of the model, are left out.
    """
    outside = {weight.names[0] for weight in graph.weights} | {value.name for value in graph.inputs}
    found = colocation_groups(graph)
    count = Counter(number for bond in found for number in bond.nodes)
    groups: dict[int, tuple[int, ...]] = {
        number: (number,) for number in range(len(graph.nodes)) if number not in count
    }
    for bond in found:
        if bond.name not in outside and all(count[number] == 1 for number in bond.nodes):
            groups[bond.nodes[-1]] = bond.nodes
    return [groups[number] for number in sorted(groups)]


def _is_pure(graph: Graph, node: Node) -> bool:
    """Whether a node gives the same values whenever and wherever it runs, and does nothing else but write values of its bond."""
    op = graph.ops[node.op]
    space, _, rest = op.name.partition(".")
    if space not in ("aten", "prims") or op.random or rest.startswith(_UNSET):
        return False
    return all(value is None or value.dtype not in SCALAR_DTYPES for value in node.outputs)


class _Scale:
    """The bytes of all inputs, weights and values at large sizes."""

    def __init__(self, graph: Graph, costs: GraphCosts) -> None:
        large = {name: max(size, _LARGE) for name, size in example_sizes(graph.symbols).items()}
        sizes = {
            symbol.name: large[symbol.name] if symbol.max is None else min(large[symbol.name], symbol.max)
            for symbol in graph.symbols
        }
        made = (value for node in graph.nodes for value in node.outputs if value is not None)
        self.bytes = {value.name: value_bytes(value, sizes) for value in (*graph.inputs, *made)} | dict(costs.weights)
        self._graph = graph

    def price(self, recipe: Recipe) -> int:
        """What it takes to compute a value again, in picoseconds; inputs of the model and weights count as sent."""
        nodes = [self._graph.nodes[number] for number in recipe.nodes]
        moved = sum(self.bytes[name] for node in nodes for name in (*input_names(node), *output_names(node)))
        fetched = sum(self.bytes[name] for name in recipe.inputs | recipe.weights)
        return memory_time(moved) + transfer_time(fetched)


def rematerialize_values(graph: Graph, stage_of: Sequence[int], stages: int, costs: GraphCosts) -> list[StageNodes]:
    """The nodes of each stage, with copies of those that make what it would else receive; what only others need is left out.

    The op table of the graph must hold `SIZE_OF`.
    """
    recipe_of = recomputation_recipes(graph, costs)
    maker = {name: number for number, node in enumerate(graph.nodes) for name in output_names(node)}
    assigned: list[list[int]] = [[] for _ in range(stages)]
    for number, stage in enumerate(stage_of):
        assigned[stage].append(number)
    parts = [_Stage(graph, maker, recipe_of, numbers).part() for numbers in assigned]
    return _without_idle(graph, parts)


@dataclass
class _Stage:
    """One stage while it is put together."""

    graph: Graph
    maker: Mapping[str, int]
    recipe_of: Mapping[str, Recipe]
    assigned: Sequence[int]
    nodes: set[int] = field(default_factory=set)
    added: list[Node] = field(default_factory=list)
    sizes: set[str] = field(default_factory=set)

    def part(self) -> StageNodes:
        """The nodes of the stage."""
        self.nodes = set(self.assigned)
        for name in self._wanted(self.assigned):
            if name in self.recipe_of:
                self.nodes |= self.recipe_of[name].nodes
        values = {value.name: value for value in self.graph.inputs}
        values |= {v.name: v for node in self.graph.nodes for v in node.outputs if v is not None}
        wanted = [values[name] for name in self._wanted(sorted(self.nodes)) if name in values]
        tensors = [value for value in wanted if value.dtype not in SCALAR_DTYPES]
        for value in wanted:
            if value.dtype == "symint":
                self._size(value, tensors, values)
        return StageNodes(added=tuple(self.added), nodes=tuple(sorted(self.nodes)))

    def _wanted(self, numbers: Sequence[int]) -> list[str]:
        """The values that nodes use and none of them makes, in the order of their making."""
        made = {name for number in numbers for name in output_names(self.graph.nodes[number])}
        used = dict.fromkeys(name for number in numbers for name in input_names(self.graph.nodes[number]))
        return sorted((name for name in used if name not in made), key=lambda name: self.maker.get(name, -1))

    def _size(self, value: Value, tensors: Sequence[Value], values: Mapping[str, Value]) -> bool:
        """Make a size here, by a node that reads it off a tensor or by its own node; False when the stage must receive it."""
        number = self.maker.get(value.name)
        if value.name in self.sizes or number is None or number in self.nodes:
            return value.name in self.sizes or number is not None
        node = self.graph.nodes[number]
        op = self.graph.ops[node.op].name
        have = {tensor.name for tensor in tensors}
        holder = next((tensor for tensor in tensors if value.expr is not None and value.expr in tensor.shape), None)
        if op == SYM_SIZE_OP.name and have.issuperset(input_names(node)):
            self.nodes.add(number)
        elif holder is not None:
            args: tuple[Argument, ...] = (ValueArg(holder.name), holder.shape.index(value.expr))
            self.added.append(Node(op=self.graph.ops.index(SYM_SIZE_OP), args=args, outputs=(value,), scope=node.scope))
        elif operator_namespace(op) in ("operator", "math", "torch") and all(
            self._size(values[name], tensors, values) for name in input_names(node)
        ):
            self.nodes.add(number)
        else:
            return False
        self.sizes.add(value.name)
        return True


def _without_idle(graph: Graph, parts: list[StageNodes]) -> list[StageNodes]:
    """Leave out of a stage the nodes whose values only other stages need, which compute them on their own."""
    copies = [0] * len(graph.nodes)
    for part in parts:
        for number in part.nodes:
            copies[number] += 1
    kept = list(parts)
    mates: dict[str, set[str]] = defaultdict(set)  # the values that share memory
    memory = alias_classes(graph).of
    for name, root in memory.items():
        mates[root].add(name)
    needed: set[str] = set(graph.outputs)  # by later stages, and by the caller
    for stage in reversed(range(len(parts))):
        here: list[int] = []
        used: set[str] = set()
        for number in reversed(parts[stage].nodes):
            node = graph.nodes[number]
            op = graph.ops[node.op]
            written = (name for parameter in op.mutates for name in parameter_value_names(node, op, parameter))
            given = {*output_names(node)}.union(*(mates[memory[name]] for name in written if name in memory))
            if given and copies[number] > 1 and not given & (used | needed):
                copies[number] -= 1
            else:
                here.append(number)
                used.update(input_names(node))
        added = tuple(made for made in parts[stage].added if used.intersection(output_names(made)))
        kept[stage] = StageNodes(added=added, nodes=tuple(reversed(here)))
        used.update(name for made in added for name in input_names(made))
        made_here = {name for number in here for name in output_names(graph.nodes[number])}
        needed |= used - made_here - {name for made in added for name in output_names(made)}
    return kept
