"""Values that may share memory, and the nodes that must stay in one stage because one of them writes memory that the others touch.

The results of views and in-place operators are in one alias class with the values they are made of. When a class is written, a cut
through it would leave one stage with a stale copy. For a buffer, a parameter or an input of the model, all nodes that touch the class
are kept together; for an activation, those up to the last write, since a value read afterwards is final.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stagepack.format.graph import Graph, Node, Op, Weight
from stagepack.format.traversal import (
    argument_value_names,
    body_values,
    input_names,
    output_names,
    passed_arguments,
    subgraph_indices,
)

# Norms that write their running statistics in training, which their schemas do not declare, by the argument that says whether they do.
_TRAINING_PARAMETERS = {
    "aten.batch_norm.default": "training",
    "aten._batch_norm_impl_index.default": "training",
    "aten.native_batch_norm.default": "training",
    "aten.cudnn_batch_norm.default": "training",
    "aten.miopen_batch_norm.default": "training",
    "aten.instance_norm.default": "use_input_stats",
}
_RUNNING_STATISTICS = ("running_mean", "running_var")
# In-place operators whose schemas say that they write, and which change no element: `torch.tensor` in a `forward` is traced with `detach_`.
_KEEPS_ELEMENTS = frozenset(
    {
        "aten.detach_.default",
        "aten.record_stream.default",
        "aten.rename_.default",
        "aten.requires_grad_.default",
        "aten.retain_grad.default",
    }
)
# Operators that copy whatever their rows say: torch traces `lift_fresh_copy` with the memory of the constant as the result's.
_COPIES = frozenset({"aten.lift_fresh_copy.default"})
# Operators that return their argument itself, or a copy where its dtype is another one.
_CONVERSIONS = ("aten.to.", "aten.type_as.", "aten._autocast_to_")


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasClasses:
    """Which values of a sequence of nodes may share memory, and which nodes write it."""

    # For each value that may share memory with others, the value that represents its class.
    representatives: Mapping[str, str]
    # The numbers of the nodes that write the memory of a class, ascending, by its representative.
    writers: Mapping[str, tuple[int, ...]]

    def representative(self, value_name: str) -> str:
        """Return the value that represents the class of a value."""
        return self.representatives.get(value_name, value_name)

    def is_written(self, value_name: str) -> bool:
        """Tell whether a node writes the memory of a value."""
        return self.representative(value_name) in self.writers


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocationGroup:
    """Nodes that must stay in one stage."""

    name: str  # the buffer, parameter, input or activation that is written
    nodes: tuple[int, ...]  # the numbers of the nodes, ascending; at least two


def alias_classes(graph: Graph) -> AliasClasses:
    """Find the values of a graph that may share memory."""
    return _alias_classes_of_nodes(_NodeMemory(graph), graph.nodes, graph.weights)


def may_write(graph: Graph) -> bool:
    """Tell whether an operator of a graph writes memory. If none does, the alias classes are not needed to know what is written."""
    return any(op.mutates or op.name in _TRAINING_PARAMETERS for op in graph.ops)


def written_inputs(graph: Graph) -> frozenset[str]:
    """Return the names of the inputs of a graph whose memory its nodes write."""
    if not may_write(graph):
        return frozenset()
    classes = alias_classes(graph)
    return frozenset(value.name for value in graph.inputs if classes.is_written(value.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWrites:
    """The values whose memory a stage writes."""

    state: Sequence[str]
    inputs: Sequence[str]


def stage_writes(graph: Graph) -> StageWrites:
    """Return the weights and inputs that a stage writes, by the names of their values."""
    classes = alias_classes(graph)
    return StageWrites(
        state=tuple(weight.value for weight in graph.weights if classes.is_written(weight.value)),
        inputs=tuple(value.name for value in graph.inputs if classes.is_written(value.name)),
    )


def written_weight_names(graph: Graph, classes: AliasClasses) -> tuple[str, ...]:
    """Return the first names of the weights that nodes write, in the order of the weight table."""
    return tuple(weight.names[0] for weight in graph.weights if classes.is_written(weight.value))


def colocation_groups(
    graph: Graph, classes: AliasClasses, touched_values: Sequence[Iterable[str]]
) -> tuple[ColocationGroup, ...]:
    """Find the nodes that must stay in one stage."""
    outside_values = {weight.value: weight.names[0] for weight in graph.weights}
    outside_values |= {value.name: value.name for value in graph.inputs}
    outside_names = {classes.representative(value_name): label for value_name, label in outside_values.items()}
    members: dict[str, list[int]] = {root: [] for root in classes.writers}
    for node_number, value_names in enumerate(touched_values if members else ()):
        for root in {classes.representative(value_name) for value_name in value_names} & members.keys():
            if root in outside_names or node_number <= classes.writers[root][-1]:
                members[root].append(node_number)
    groups = (
        ColocationGroup(name=outside_names.get(root, root), nodes=tuple(node_numbers))
        for root, node_numbers in members.items()
        if len(node_numbers) > 1
    )
    return tuple(sorted(groups, key=lambda group: group.nodes))


def impurity_reason(graph: Graph, nodes: Sequence[Node], outputs: Iterable[str]) -> str | None:
    """Say why a run of nodes is impure: it writes one of its inputs, or returns a view of one. None for a function of its inputs."""
    defined: set[str] = set()
    input_labels: dict[str, str] = {}
    for node in nodes:
        input_labels |= {value_name: value_name for value_name in input_names(node) if value_name not in defined}
        defined.update(output_names(node))
    weights = [weight for weight in graph.weights if weight.value in input_labels]
    input_labels |= {weight.value: weight.names[0] for weight in weights}
    classes = _alias_classes_of_nodes(_NodeMemory(graph), nodes, weights)
    labels = {classes.representative(value_name): label for value_name, label in input_labels.items()}
    for root, writers in classes.writers.items():
        if root in labels:
            return f"{graph.ops[nodes[writers[0]].op].name} writes {labels[root]}"
    for value_name in outputs:
        root = classes.representative(value_name)
        if root in labels:
            return f"{value_name} is a view of {labels[root]}"
    return None


def _alias_classes_of_nodes(
    node_memory: "_NodeMemory", nodes: Iterable[Node], weights: Iterable[Weight]
) -> AliasClasses:
    """The alias classes of consecutive nodes, whose numbers count from the first of them."""
    union_find = _UnionFind()
    first_on_storage: dict[str, str] = {}
    for weight in weights:
        union_find.merge(weight.value, first_on_storage.setdefault(weight.stored, weight.value))
    writes: list[tuple[str, int]] = []
    for node_number, node in enumerate(nodes):
        for value_name, target_name in node_memory.aliased_values(node):
            union_find.merge(value_name, target_name)
        writes += ((value_name, node_number) for value_name in node_memory.written_values(node))
    writers: dict[str, dict[int, None]] = {}
    for value_name, node_number in writes:
        writers.setdefault(union_find.root(value_name), {})[node_number] = None
    return AliasClasses(
        representatives=union_find.roots(),
        writers={root: tuple(node_numbers) for root, node_numbers in writers.items()},
    )


class _UnionFind:
    """Disjoint sets of values. Two sets that are merged are represented by the representative of the second."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, value_name: str) -> str:
        """The representative of the set of a value."""
        path = []
        while (parent := self._parents.get(value_name, value_name)) != value_name:
            path.append(value_name)
            value_name = parent
        self._parents.update(dict.fromkeys(path, value_name))
        return value_name

    def merge(self, value_name: str, target_name: str) -> None:
        """Put two values into one set."""
        self._parents[self.root(value_name)] = self.root(target_name)

    def roots(self) -> dict[str, str]:
        """The representative of each value that was merged with another."""
        value_names = dict.fromkeys((*self._parents, *self._parents.values()))
        return {value_name: self.root(value_name) for value_name in value_names}


@dataclass(frozen=True, slots=True)
class _OpMemory:
    """The parameters of an operator by what happens to the memory of their arguments."""

    viewed_by_first: frozenset[str]  # result 0 may be a view of them
    viewed: frozenset[str]  # a result may be a view of them
    written: frozenset[str]
    # Says whether the running statistics are written too; None for an operator without this parameter.
    training: str | None
    converts: bool  # a result of another dtype than the argument is a copy


def _op_memory(op: Op) -> _OpMemory:
    training = _TRAINING_PARAMETERS.get(op.name)
    aliases = () if op.name in _COPIES else op.aliases
    return _OpMemory(
        viewed_by_first=frozenset(parameter for result_index, parameter in aliases if result_index == 0),
        viewed=frozenset(parameter for _, parameter in aliases),
        written=frozenset() if op.name in _KEEPS_ELEMENTS else frozenset(op.mutates),
        training=training if {training, *_RUNNING_STATISTICS} <= {*op.parameters} else None,
        converts=op.name.startswith(_CONVERSIONS),
    )


class _NodeMemory:
    """The values of the nodes of a graph that share memory, and those that the nodes write.

    What holds for an operator or a subgraph is found once, however many nodes call it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._op_memory: dict[int, _OpMemory] = {}
        self._subgraph_writes: dict[int, bool] = {}

    def aliased_values(self, node: Node) -> Iterator[tuple[str, str]]:
        """Yield pairs of values that may share memory, which join all that may: a link to the first for each, not all pairs."""
        memory = self._memory(node)
        # An operator that returns one list names it as result 0; every item may be a view.
        viewed_parameters = memory.viewed if node.unpack else memory.viewed_by_first
        viewed_names = self._passed_names(node, viewed_parameters)
        if memory.converts and node.outputs and node.outputs[0] is not None:
            viewed_names = [name for name in viewed_names if self._dtypes.get(name) == node.outputs[0].dtype]
        result_names = list(output_names(node)) if viewed_names else []
        if result_names:
            yield from ((result_names[0], viewed_name) for viewed_name in viewed_names)
            yield from ((result_name, viewed_names[0]) for result_name in result_names[1:])

    def written_values(self, node: Node) -> list[str]:
        """The values that a node writes: all its inputs when a branch or loop body that it calls writes an input."""
        memory = self._memory(node)
        value_names = self._passed_names(node, memory.written)
        if memory.training is not None and dict(passed_arguments(node, self._graph.ops[node.op])).get(memory.training):
            value_names += self._passed_names(node, frozenset(_RUNNING_STATISTICS))
        if self._graph.subgraphs and any(map(self._subgraph_writes_input, subgraph_indices(node))):
            value_names += input_names(node)
        return value_names

    def _memory(self, node: Node) -> _OpMemory:
        if node.op not in self._op_memory:
            self._op_memory[node.op] = _op_memory(self._graph.ops[node.op])
        return self._op_memory[node.op]

    def _passed_names(self, node: Node, parameters: frozenset[str]) -> list[str]:
        """The names of the values that a node passes to some of the parameters of its operator."""
        if not parameters:
            return []
        return [
            value_name
            for parameter, argument in passed_arguments(node, self._graph.ops[node.op])
            if parameter in parameters
            for value_name in argument_value_names(argument)
        ]

    def _subgraph_writes_input(self, subgraph_index: int) -> bool:
        if subgraph_index not in self._subgraph_writes:
            subgraph = self._graph.subgraphs[subgraph_index]
            # The values of a subgraph have names of their own.
            memory = copy.copy(self)
            vars(memory)["_dtypes"] = {value.name: value.dtype for value in body_values(subgraph)}
            classes = _alias_classes_of_nodes(memory, subgraph.nodes, ())
            writes_input = any(classes.is_written(value.name) for value in subgraph.inputs)
            self._subgraph_writes[subgraph_index] = writes_input
        return self._subgraph_writes[subgraph_index]

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        weight_dtypes = {weight.value: weight.dtype for weight in self._graph.weights}
        return {value.name: value.dtype for value in body_values(self._graph)} | weight_dtypes
