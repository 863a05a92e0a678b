"""Compute values again in the stages that use them, where that is cheaper than to send them.

A copy of a node is the node itself, in a second stage: joining the stages finds it at one position of the whole model and keeps it once. A
size is read off a tensor that the stage has anyway, where there is one; the node that reads it is no copy. Otherwise a stage that has the
tensor reads the size and sends it as an integer: no tensor is sent for its size.

What is computed again elsewhere may leave the stage that it was assigned to, but it empties no stage, and takes no parameter along, nor any
weight of a module that the caller has put into the stage by its name.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph, Node, Op, Value, ValueArg
from stagepack.format.operators import SIZE_OPERATOR, operator_namespace
from stagepack.format.traversal import argument_value_names, input_names, output_names, passed_arguments
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.assignment import StageAssignment
from stagepack.partition.recipes import SCALAR_NAMESPACES, CostedGraph, Recipe

SYM_SIZE_OP = Op(
    name=SIZE_OPERATOR, schema="aten::sym_size.int(Tensor self, int dim) -> SymInt", parameters=("self", "dim")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNodes:
    """The nodes of one stage."""

    # Nodes that are in no other stage; they run first.
    added: tuple[Node, ...] = ()
    # The numbers of the nodes of the whole graph, ascending.
    node_numbers: tuple[int, ...]

    def input_names(self, analysis: GraphAnalysis) -> dict[str, None]:
        """Return the distinct names of the values that the nodes use, in the order of first use."""
        added_names = dict.fromkeys(value_name for node in self.added for value_name in input_names(node))
        return added_names | analysis.used_by(self.node_numbers)

    def output_names(self, analysis: GraphAnalysis) -> set[str]:
        """Return the names of the values that the nodes define."""
        added_names = {value_name for node in self.added for value_name in output_names(node)}
        return added_names | analysis.defined_by(self.node_numbers).keys()


def ops_with_sym_size(graph: Graph) -> tuple[Op, ...]:
    """Return the operator table that the nodes of `rematerialize_values` refer to."""
    return graph.ops if SYM_SIZE_OP in graph.ops else (*graph.ops, SYM_SIZE_OP)


def rematerialize_values(costed: CostedGraph, assignment: StageAssignment) -> list[StageNodes]:
    """Find the nodes of each stage: those assigned to it, and copies of those that define values which it would else receive."""
    assigned: list[list[int]] = [[] for _ in range(assignment.stage_count)]
    for node_number, stage_number in enumerate(assignment.stage_of):
        assigned[stage_number].append(node_number)
    recipes = costed.recipes
    while True:
        stages, applied = _collect_nodes(costed, recipes, assigned)
        refused = _refused_recipes(costed, assignment, assigned, stages, applied)
        if not refused:
            break
        recipes = {value_name: recipe for value_name, recipe in recipes.items() if value_name not in refused}
    if not any(_receives_for_sizes(costed, stage) for stage in stages):
        return stages
    # The nodes that used the tensors have been left out since: the sizes have other sources then.
    used = [
        [node_number for node_number in node_numbers if node_number in costed.size_nodes.union(stage.node_numbers)]
        for node_numbers, stage in zip(assigned, stages, strict=True)
    ]
    without_unused, _ = _collect_nodes(costed, recipes, used)
    stage_nodes = set[int]().union(*(stage.node_numbers for stage in without_unused))
    return without_unused if len(stage_nodes) == len(assignment.stage_of) else stages


def _collect_nodes(
    costed: CostedGraph, recipes: Mapping[str, Recipe], assigned: Sequence[Sequence[int]]
) -> tuple[list[StageNodes], dict[str, Recipe]]:
    """The nodes of each stage, with the recipes that are applied, by the names of their values."""
    sym_size_index = ops_with_sym_size(costed.graph).index(SYM_SIZE_OP)
    builders = [_StageBuilder(costed, recipes, node_numbers, sym_size_index) for node_numbers in assigned]
    _place_size_nodes(builders)
    stages = _without_unused_nodes(costed.analysis, [builder.build() for builder in builders])
    return stages, {value_name: recipes[value_name] for builder in builders for value_name in builder.applied}


def _receives_for_sizes(costed: CostedGraph, stage: StageNodes) -> bool:
    """Whether a stage that does more than to ask for sizes receives a tensor for its size alone."""
    analysis, content_nodes = costed.analysis, costed.content_nodes(stage.node_numbers)
    size_names = stage.input_names(analysis).keys() - analysis.used_by(content_nodes) - stage.output_names(analysis)
    return bool(content_nodes) and not costed.sent_values.isdisjoint(size_names)


def _place_size_nodes(builders: Sequence["_StageBuilder"]) -> None:
    """Put each node that asks for a size into the first stage that has its tensor, unless an earlier stage needs the size.

    Without such a stage the node stays where it is, which then receives the tensor: an input of the model that no other stage has in time.
    """
    for assigned_builder in builders:
        for node_number in assigned_builder.missing_nodes:
            home = assigned_builder
            for stage_number, builder in enumerate(builders):
                if builder.can_run(node_number, builders[:stage_number]):
                    home = builder
                    break
                if builder.needs_result_of(node_number):
                    break
            home.add(node_number)


def _refused_recipes(
    costed: CostedGraph,
    assignment: StageAssignment,
    assigned: Sequence[Sequence[int]],
    stages: Sequence[StageNodes],
    applied: Mapping[str, Recipe],
) -> set[str]:
    """The values whose copies have emptied a stage, or taken weights out of it that must stay."""
    analysis = costed.analysis
    prefixes = tuple(f"{module_path}." for module_path in assignment.named_modules)
    weights = {weight.value: weight for weight in analysis.graph.weights}
    refused: set[str] = set()
    for node_numbers, stage in zip(assigned, stages, strict=True):
        left_out = set(node_numbers).difference(stage.node_numbers)
        lost = [weights[value_name] for value_name in analysis.used_by(left_out) if value_name in weights]
        lost = [weight for weight in lost if weight.value not in stage.input_names(analysis)]
        named = {weight.value for weight in lost if any(name.startswith(prefixes) for name in weight.names)}
        # What is made of weights and sizes alone is the same in each call: its weights may go to where it is used.
        parameters = {weight.value for weight in lost if weight.kind == "parameter"}
        is_emptied = left_out.issuperset(costed.content_nodes(node_numbers) or node_numbers)
        for value_name, recipe in applied.items():
            kept_weights = named | parameters if recipe.inputs else named
            if not recipe.nodes.isdisjoint(left_out) and (is_emptied or not recipe.weights.isdisjoint(kept_weights)):
                refused.add(value_name)
    return refused


class _StageBuilder:
    """One stage while its nodes are collected."""

    def __init__(
        self, costed: CostedGraph, recipes: Mapping[str, Recipe], assigned: Sequence[int], sym_size_index: int
    ) -> None:
        # The values that the stage computes again by a recipe.
        self.applied: list[str] = []
        # The nodes that ask for sizes of tensors which the stage would receive for nothing else.
        self.missing_nodes: list[int] = []
        self._analysis = costed.analysis
        self._recipes = recipes
        self._sym_size_index = sym_size_index
        self._node_numbers: set[int] = set()
        # The values that its nodes use or define.
        self._present: set[str] = set()
        # The values that its nodes use, and those that the missing nodes use which define one of these.
        self._used: set[str] = set()
        self._added: list[Node] = []
        # The sizes that the stage computes itself, by added nodes or by copies.
        self._sizes: set[str] = set()
        # A stage that only asks for sizes must not be emptied.
        content_nodes = costed.content_nodes(assigned) or assigned
        self.add(*content_nodes)
        for value_name in self._received_names():
            if value_name in recipes:
                self._compute_again(value_name)
        for node_number in sorted(set(assigned).difference(content_nodes)):
            self._add_if_possible(node_number)
        for node_number in reversed(self.missing_nodes):
            if self.needs_result_of(node_number):
                self._used.update(self._analysis.node_inputs[node_number])

    def add(self, *node_numbers: int) -> None:
        """Add nodes."""
        used_names = self._analysis.used_by(node_numbers).keys()
        self._node_numbers.update(node_numbers)
        self._used |= used_names
        self._present |= used_names | self._analysis.defined_by(node_numbers).keys()

    def can_run(self, node_number: int, earlier: Sequence["_StageBuilder"]) -> bool:
        """Whether the stage has the tensors that a node uses, and it or an earlier stage the symbolic scalars."""
        scalars = list(filter(self._is_scalar, self._analysis.node_inputs[node_number]))
        return not self._missing_tensors(node_number) and all(
            any(stage.defines(scalar) for stage in (*earlier, self)) for scalar in scalars
        )

    def defines(self, value_name: str) -> bool:
        """Whether a node of the stage defines a value, or the value is an input of the model."""
        node_number = self._analysis.producers.get(value_name)
        return node_number is None or node_number in self._node_numbers

    def needs_result_of(self, node_number: int) -> bool:
        """Whether the stage must receive the result of a node: it uses the result, and cannot read it off a tensor that it receives."""
        values, producers = self._analysis.values, self._analysis.producers
        used_names = self._used.intersection(self._analysis.node_outputs[node_number])
        received_sizes = {
            dim
            for value_name in (self._present & values.keys() if used_names else ())
            if producers.get(value_name) not in self._node_numbers
            for dim in values[value_name].shape
        }
        return any(values[value_name].expr not in received_sizes for value_name in used_names)

    def build(self) -> StageNodes:
        """Add what the stage computes again."""
        values = self._analysis.values
        received = [values[value_name] for value_name in self._received_names() if value_name in values]
        tensors = [value for value in received if value.dtype not in SCALAR_DTYPES]
        for value in received:
            if value.dtype == "symint":
                self._compute_size(value, tensors)
        return StageNodes(added=tuple(self._added), node_numbers=tuple(sorted(self._node_numbers)))

    def _compute_again(self, value_name: str) -> None:
        self.applied.append(value_name)
        self.add(*self._recipes[value_name].nodes)

    def _add_if_possible(self, node_number: int) -> None:
        """Add a node that asks for sizes, if the stage has its tensors, or computes them again from what it has."""
        missing_tensors = self._missing_tensors(node_number)
        recipes = [self._recipes.get(value_name) for value_name in missing_tensors]
        is_possible = all(recipe and recipe.inputs | recipe.weights <= self._present for recipe in recipes)
        missing_names = self._analysis.defined_by(self.missing_nodes).keys()
        if is_possible and missing_names.isdisjoint(self._analysis.node_inputs[node_number]):
            for value_name in missing_tensors:
                self._compute_again(value_name)
            self.add(node_number)
        else:
            self.missing_nodes.append(node_number)

    def _missing_tensors(self, node_number: int) -> list[str]:
        """The tensors that a node uses and the stage does not have."""
        used_names = self._analysis.node_inputs[node_number]
        return [
            value_name
            for value_name in used_names
            if value_name not in self._present and not self._is_scalar(value_name)
        ]

    def _is_scalar(self, value_name: str) -> bool:
        value = self._analysis.values.get(value_name)
        return value is not None and value.dtype in SCALAR_DTYPES

    def _received_names(self) -> list[str]:
        """The values that the nodes use and none of them defines, in the order of their definition."""
        analysis, node_numbers = self._analysis, sorted(self._node_numbers)
        defined = analysis.defined_by(node_numbers)
        received = [value_name for value_name in analysis.used_by(node_numbers) if value_name not in defined]
        return sorted(received, key=lambda value_name: analysis.producers.get(value_name, -1))

    def _compute_size(self, size: Value, tensors: Sequence[Value]) -> bool:
        """Compute a size in this stage, from the shape of a tensor or by its own node; False when the stage must receive it."""
        node_number = self._analysis.producers.get(size.name)
        if size.name in self._sizes or node_number is None or node_number in self._node_numbers:
            return size.name in self._sizes or node_number is not None
        node = self._analysis.graph.nodes[node_number]
        op_name = self._analysis.graph.ops[node.op].name
        used_names = self._analysis.node_inputs[node_number]
        sized_tensor = next((tensor for tensor in tensors if size.expr is not None and size.expr in tensor.shape), None)
        if op_name == SYM_SIZE_OP.name and {tensor.name for tensor in tensors}.issuperset(used_names):
            self._node_numbers.add(node_number)
        elif sized_tensor is not None:
            args = (ValueArg(sized_tensor.name), sized_tensor.shape.index(size.expr))
            self._added.append(Node(op=self._sym_size_index, args=args, outputs=(size,), scope=node.scope))
        elif operator_namespace(op_name) in SCALAR_NAMESPACES and all(
            self._compute_size(self._analysis.values[value_name], tensors) for value_name in used_names
        ):
            self._node_numbers.add(node_number)
        else:
            return False
        self._sizes.add(size.name)
        return True


def _without_unused_nodes(analysis: GraphAnalysis, stages: Sequence[StageNodes]) -> list[StageNodes]:
    """Leave out of a stage the nodes whose values only other stages use, which compute them themselves."""
    copy_counts = Counter(node_number for stage in stages for node_number in stage.node_numbers)
    memory_of_node = _MemoryOfNodes(analysis)
    kept_stages: list[StageNodes] = []
    needed_later = set(analysis.graph.outputs)
    for stage in reversed(stages):
        kept_numbers: list[int] = []
        used: set[str] = set()
        for node_number in reversed(stage.node_numbers):
            if copy_counts[node_number] > 1:
                results = memory_of_node.results(node_number)
                if results and results.isdisjoint(used) and results.isdisjoint(needed_later):
                    copy_counts[node_number] -= 1
                    continue
            kept_numbers.append(node_number)
            used.update(analysis.node_inputs[node_number])
        added = tuple(node for node in stage.added if not used.isdisjoint(output_names(node)))
        kept_stage = StageNodes(added=added, node_numbers=tuple(reversed(kept_numbers)))
        kept_stages.append(kept_stage)
        needed_later |= kept_stage.input_names(analysis).keys() - kept_stage.output_names(analysis)
    return kept_stages[::-1]


class _MemoryOfNodes:
    """The values through which other nodes can see that a node ran."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self._analysis = analysis
        self._written_parameters = [frozenset(op.mutates) for op in analysis.graph.ops]
        self._members: dict[str, set[str]] = defaultdict(set)
        for value_name, root in analysis.alias_classes.representatives.items():
            self._members[root].add(value_name)

    def results(self, node_number: int) -> set[str]:
        """The values that a node defines, and all that may share memory with what it writes."""
        graph, representatives = self._analysis.graph, self._analysis.alias_classes.representatives
        node = graph.nodes[node_number]
        written = {
            value_name
            for parameter, argument in passed_arguments(node, graph.ops[node.op])
            if parameter in self._written_parameters[node.op]
            for value_name in argument_value_names(argument)
        }
        shared = (self._members[representatives[value_name]] for value_name in written if value_name in representatives)
        return set(self._analysis.node_outputs[node_number]).union(*shared)
