"""Nodes that must stay in one stage, because one of them writes memory that the others touch.

Values that may share memory form a class: the results of views and in-place operators with what they were made of. When a class
is written, a cut through it would leave one stage with a stale copy. For a buffer, a parameter or an input of the model all
nodes that touch the class are bound together; for an activation those up to the last write, since what is read afterwards
is final.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagepack.format.graph import Graph, Node, Subgraph
from stagepack.format.traversal import (
    input_names,
    output_names,
    parameter_argument,
    parameter_value_names,
    subgraph_indices,
)

# Norms that write their running statistics when they train, which their schemas do not say -> the argument that says whether.
_TRAINS = {
    "aten.batch_norm.default": "training",
    "aten._batch_norm_impl_index.default": "training",
    "aten.native_batch_norm.default": "training",
    "aten.cudnn_batch_norm.default": "training",
    "aten.miopen_batch_norm.default": "training",
    "aten.instance_norm.default": "use_input_stats",
}
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocationGroup:
    """Numbers of nodes, ascending, that must stay in one stage; `name` is the buffer, input or value that is written."""

    name: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasClasses:
    """Which values of a graph may share memory.

    Attributes:
        of: for each value that may share memory with others, a value that stands for all of them.
        written: those that stand for memory which a node writes.
    """

    of: Mapping[str, str]
    written: frozenset[str]

    def is_written(self, name: str) -> bool:
        """Whether a node writes the memory of a value."""
        return self.of.get(name, name) in self.written


def alias_classes(graph: Graph) -> AliasClasses:
    """Which values of a graph share memory, and which memory is written."""
    classes = _Classes(graph)
    written: set[str] = set()
    for node in graph.nodes:
        classes.add(graph, node)
        written.update(_written(graph, node))
    return AliasClasses(
        of={name: classes.root(name) for name in classes.names},
        written=frozenset(map(classes.root, written)),
    )


def colocation_groups(graph: Graph) -> list[ColocationGroup]:
    """The bonds of a graph, by the first node of each."""
    classes = _Classes(graph)
    writes: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        classes.add(graph, node)
        for name in _written(graph, node):
            writes[name] = number
    last_write: dict[str, int] = {}
    for name, number in writes.items():
        root = classes.root(name)
        last_write[root] = max(number, last_write.get(root, 0))
    outside = {weight.value: weight.names[0] for weight in graph.weights} | {
        value.name: value.name for value in graph.inputs
    }
    from_outside = {classes.root(value): name for value, name in outside.items() if classes.root(value) in last_write}
    touching: dict[str, list[int]] = {root: [] for root in last_write}
    for number, node in enumerate(graph.nodes):
        for root in {classes.root(name) for name in (*input_names(node), *output_names(node))} & touching.keys():
            if root in from_outside or number <= last_write[root]:
                touching[root].append(number)
    found = (ColocationGroup(name=from_outside.get(root, root), nodes=tuple(nodes)) for root, nodes in touching.items())
    return sorted((bond for bond in found if len(bond.nodes) > 1), key=lambda bond: bond.nodes)


def written_weight_names(graph: Graph) -> tuple[str, ...]:
    """The names of the weights that the nodes of a graph write, in the order of the weight table."""
    written = _written_among(graph, graph.nodes, [weight.value for weight in graph.weights])
    return tuple(weight.names[0] for weight in graph.weights if weight.value in written)


class _Classes:
    """Classes of values that may share memory (union-find): weights on one stored tensor at first, else each value its own."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[str, str] = {}
        lies_on: dict[str, str] = {}
        for weight in graph.weights:
            self._parent[weight.value] = lies_on.setdefault(weight.stored, weight.value)

    @property
    def names(self) -> tuple[str, ...]:
        """The values that were seen to share memory."""
        return tuple({**self._parent, **dict.fromkeys(self._parent.values())})

    def root(self, name: str) -> str:
        path = []
        while (above := self._parent.get(name, name)) != name:
            path.append(name)
            name = above
        self._parent.update(dict.fromkeys(path, name))
        return name

    def add(self, graph: Graph, node: Node) -> None:
        op = graph.ops[node.op]
        for index, parameter in op.aliases:
            # An operator that returns one list names it as result 0; every item may be a view.
            outputs = node.outputs if node.unpack else node.outputs[index : index + 1]
            for output in filter(None, outputs):
                for name in parameter_value_names(node, op, parameter):
                    self._parent[self.root(output.name)] = self.root(name)


def _written(graph: Graph, node: Node) -> Iterable[str]:
    """The values that a node writes; when a branch or loop body writes an input, all that the node is given."""
    op = graph.ops[node.op]
    for parameter in op.mutates:
        yield from parameter_value_names(node, op, parameter)
    if {_TRAINS.get(op.name), *_STATISTICS} <= {*op.parameters} and parameter_argument(node, op, _TRAINS[op.name]):
        for parameter in _STATISTICS:
            yield from parameter_value_names(node, op, parameter)
    if any(_writes_input(graph, graph.subgraphs[index]) for index in subgraph_indices(node)):
        yield from input_names(node)


def _writes_input(graph: Graph, subgraph: Subgraph) -> bool:
    return bool(_written_among(graph, subgraph.nodes, [value.name for value in subgraph.inputs]))


def _written_among(graph: Graph, nodes: Iterable[Node], names: Iterable[str]) -> set[str]:
    """Those of the named values whose memory the nodes write."""
    classes = _Classes(graph)
    written: set[str] = set()
    for node in nodes:
        classes.add(graph, node)
        written.update(_written(graph, node))
    roots = {classes.root(name) for name in written}
    return {name for name in names if classes.root(name) in roots}


def split_groups(found: Iterable[ColocationGroup], stages: list[int]) -> Iterator[ColocationGroup]:
    """Yield the bonds that an assignment of nodes to stages would tear."""
    return (bond for bond in found if len({stages[number] for number in bond.nodes}) > 1)


def impurity_reason(graph: Graph, nodes: Sequence[Node], outputs: Iterable[str]) -> str | None:
    """What keeps a run of nodes from being a function of what it is given: that it writes it, or gives out a view of it.

    `outputs` are the values that it gives out. None when it is a function.
    """
    classes = _Classes(graph)
    written: dict[str, str] = {}
    made: set[str] = set()
    given: dict[str, str] = {}
    for node in nodes:
        classes.add(graph, node)
        given |= {name: name for name in input_names(node) if name not in made}
        made.update(output_names(node))
        written |= {name: graph.ops[node.op].name for name in _written(graph, node)}
    given |= {weight.value: weight.names[0] for weight in graph.weights if weight.value in given}
    roots = {classes.root(value): name for value, name in given.items()}
    for value, op in written.items():
        if classes.root(value) in roots:
            return f"{op} writes {roots[classes.root(value)]}"
    for value in outputs:
        if classes.root(value) in roots:
            return f"{value} is a view of {roots[classes.root(value)]}"
    return None
