"""The agreement of the stages of an entry point with each other: they are the parts of one model (SPEC G18, G19)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from stagepack.errors import Problem
from stagepack.format.aliasing import alias_classes, colocation_groups, may_write
from stagepack.format.assembly import GraphAssembler
from stagepack.format.graph import Graph, ModuleCall, Node, Op, Value
from stagepack.format.manifest import EntryPoint
from stagepack.format.node_contents import NodeContents
from stagepack.format.plan import run_members
from stagepack.format.rules import MANIFEST_NAME
from stagepack.format.traversal import input_names, output_names, random_nodes


def check_whole_model(entry_point: EntryPoint, graphs: Sequence[Graph]) -> Iterator[Problem]:
    """Yield the problems of the stages of an entry point together. `check_stage` must have found none in each of them."""
    if not any(stage.places for stage in entry_point.stages):
        return
    broken_rules = list(_check_tables(graphs))
    if not broken_rules:
        model = _WholeModel.of(entry_point, graphs)
        broken_rules += _check_copies(model)
        broken_rules += _check_definitions(model)
        broken_rules += _check_calls(model)
        # Values share memory by their names, so that each name must be one value.
        broken_rules += () if broken_rules else _check_order(model)
    for rule, stage_number, message in broken_rules:
        yield Problem(rule=rule, where=entry_point.stages[stage_number].graph, message=message)


def check_plan(
    entry_point: EntryPoint, graphs: Sequence[Graph], bytes_of_stored: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield the problems of the costs of nodes in a plan. `check_whole_model` must have found none."""
    if entry_point.plan is None or not any(stage.places for stage in entry_point.stages):
        return
    nodes = _WholeModel.of(entry_point, graphs).nodes
    weights = {weight.value: weight.stored for graph in graphs for weight in graph.weights}
    for stage_number, planned in enumerate(entry_point.plan.stages):
        places = [nodes[position] for position in run_members(planned.nodes)]
        used_names = {value_name for node_copy in places for value_name in input_names(node_copy.node)}
        scopes = [graphs[node_copy.stage_number].scopes[node_copy.node.scope].path for node_copy in places[:1]]
        expected = replace(
            planned,
            module=scopes[0] if scopes else "",
            flops=sum(node_copy.node.cost.flops for node_copy in places),
            bytes=sum(node_copy.node.cost.bytes for node_copy in places),
            weight_bytes=sum(bytes_of_stored[name] for name in {weights[name] for name in used_names & weights.keys()}),
        )
        for field in ("module", "flops", "bytes", "weight_bytes"):
            if getattr(expected, field) != getattr(planned, field):
                message = (
                    f"expected the {field} of its nodes, {getattr(expected, field)}, found {getattr(planned, field)}"
                )
                yield Problem(rule="M17", where=f"{MANIFEST_NAME}: plan, stage {stage_number}", message=message[:400])


# A broken rule, the number of the stage, and a message.
_BrokenStageRule = tuple[str, int, str]


class _NodeCopy(NamedTuple):
    """A node of the whole model in one of the stages that have it."""

    position: int
    stage_number: int
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class _WholeModel:
    """All nodes of the stages, by their positions in the whole model."""

    entry_point: EntryPoint
    graphs: Sequence[Graph]
    node_copies: Sequence[_NodeCopy]  # the nodes, by position and then by stage
    nodes: Sequence[_NodeCopy]  # the node at each position, from the first of its stages
    stages_of: Sequence[Sequence[int]]  # the stages that have the node of a position

    @classmethod
    def of(cls, entry_point: EntryPoint, graphs: Sequence[Graph]) -> "_WholeModel":
        node_copies = [
            _NodeCopy(position, stage_number, node)
            for stage_number, (stage, graph) in enumerate(zip(entry_point.stages, graphs, strict=True))
            for position, node in zip(run_members(stage.places), graph.nodes[stage.added :], strict=True)
        ]
        node_copies.sort(key=lambda node_copy: node_copy[:2])
        nodes: list[_NodeCopy] = []
        stages_of: list[list[int]] = []
        for node_copy in node_copies:
            if node_copy.position == len(nodes):  # every position is in a stage (M12)
                nodes.append(node_copy)
                stages_of.append([])
            stages_of[-1].append(node_copy.stage_number)
        return cls(entry_point=entry_point, graphs=graphs, node_copies=node_copies, nodes=nodes, stages_of=stages_of)


def _check_tables(graphs: Sequence[Graph]) -> Iterator[_BrokenStageRule]:
    """Yield the operators and weights that are others in another stage."""
    ops: dict[str, Op] = {}
    names_of: dict[str, tuple[str, ...]] = {}
    value_of: dict[str, str] = {}
    for stage_number, graph in enumerate(graphs):
        for op in graph.ops:
            if ops.setdefault(op.name, op) != op:
                yield "G19", stage_number, f"the operator {op.name} differs from the one of this name in another stage"
        for weight in graph.weights:
            # Weights of one name are compared by W8.
            is_same = names_of.setdefault(weight.value, weight.names)[0] == weight.names[0]
            if not is_same or value_of.setdefault(weight.names[0], weight.value) != weight.value:
                message = (
                    f"is the value {weight.value[:80]}, which another stage has with another name or for another weight"
                )
                yield "G19", stage_number, f"the weight {weight.names[0][:80]!r} {message}"


def _check_copies(model: _WholeModel) -> Iterator[_BrokenStageRule]:
    """Yield the nodes of one position that are not the same node."""
    contents = [NodeContents(graph) for graph in model.graphs]
    first_contents: dict[int, bytes] = {}
    for node_copy in model.node_copies:
        first = model.nodes[node_copy.position]
        if first is node_copy:
            continue
        if node_copy.position not in first_contents:
            first_contents[node_copy.position] = contents[first.stage_number].content(first.node)
        if contents[node_copy.stage_number].content(node_copy.node) != first_contents[node_copy.position]:
            message = f"the node at position {node_copy.position} of the whole model differs from that of another stage"
            yield "G19", node_copy.stage_number, message


def _check_definitions(model: _WholeModel) -> Iterator[_BrokenStageRule]:
    """Yield the values that several nodes define, and those that a node uses before a node defines them."""
    outside = {value_name for graph in model.graphs for value_name in (weight.value for weight in graph.weights)}
    outside |= {edge.name for edge in model.entry_point.inputs}
    values: dict[str, Value] = {}
    positions: dict[str, int] = {}
    for position, stage_number, node in model.nodes:
        for value in node.outputs:
            if value is not None:
                if value.name in values or value.name in outside:
                    yield "G19", stage_number, f"the value {value.name[:80]} is another one in another stage"
                values[value.name], positions[value.name] = value, position
    for position, stage_number, node in model.nodes:  # copies are compared with these
        for value_name in input_names(node):
            if value_name not in outside and positions.get(value_name, position) >= position:
                message = f"uses {value_name[:80]}, which no earlier node of the whole model defines"
                yield "G19", stage_number, f"the node at position {position} {message}"
    for stage_number, (stage, graph) in enumerate(zip(model.entry_point.stages, model.graphs, strict=True)):
        for node in graph.nodes[: stage.added]:
            for value in node.outputs:
                if value is not None and values.get(value.name) != value:
                    message = "is not the one of this name in the whole model"
                    yield "G19", stage_number, f"the size {value.name[:80]} of an added node {message}"


def _check_calls(model: _WholeModel) -> Iterator[_BrokenStageRule]:
    """Yield the module calls that differ between stages, and those that a stage lacks, or has without one of their nodes."""
    calls: dict[str, ModuleCall] = {}
    stages_with: dict[str, list[int]] = {}
    for stage_number, graph in enumerate(model.graphs):
        for call in graph.calls:
            if calls.setdefault(call.path, call) != call:
                yield "G19", stage_number, f"the call of {call.path[:80]!r} differs from that in another stage"
            stages_with.setdefault(call.path, []).append(stage_number)
    for path, call in calls.items():
        # Calls are nested at most 64 deep, so that this is at most 64 times the number of nodes.
        end = int(call.first) + call.nodes
        stages = set(itertools.chain.from_iterable(model.stages_of[int(call.first) : end]))
        if end > len(model.nodes) or stages_with[path] != sorted(stages):
            message = (
                f"is in the stages {stages_with[path][:9]}: expected it in those that have its nodes, and no others"
            )
            yield "G19", stages_with[path][0], f"the call of {path[:80]!r} {message}"


def _check_order(model: _WholeModel) -> Iterator[_BrokenStageRule]:
    """Yield what depends on the order of nodes, and runs in another order than in the whole model: draws, and uses of written memory."""
    last_stage = 0
    for node_number in sorted(set(_random_positions(model))):
        stages = model.stages_of[node_number]
        if len(stages) > 1 or stages[0] < last_stage:
            message = "draws random numbers, and runs in several stages or before an earlier node of the whole model"
            yield "G19", stages[-1], f"the node at position {node_number} {message}"
        last_stage = max(last_stage, stages[-1])
    if not any(map(may_write, model.graphs)):
        return
    graph = _joined(model)
    classes = alias_classes(graph)
    touched_values = [[*input_names(node), *output_names(node)] for node in graph.nodes]
    positions = {value_name: number for number, node in enumerate(graph.nodes) for value_name in output_names(node)}
    for group in colocation_groups(graph, classes, touched_values):
        stages = sorted({stage for node_number in group.nodes for stage in model.stages_of[node_number]})
        # The memory of a value is made again where all is computed again that writes it.
        is_local = group.name in positions and all(
            _has_all(model, stage, group.nodes, classes.writers.get(group.name, ()), positions) for stage in stages
        )
        if len(stages) > 1 and not is_local:
            message = f"is written, and the nodes that touch its memory are in the stages {stages[:9]}"
            yield "G18", stages[-1], f"{group.name[:80]!r} {message}"


def _random_positions(model: _WholeModel) -> Iterator[int]:
    """Yield the positions of the nodes that draw random numbers, with repeats."""
    for stage, graph in zip(model.entry_point.stages, model.graphs, strict=True):
        positions = stage.node_numbers
        yield from (positions[node_number] for node_number in random_nodes(graph))


def _has_all(
    model: _WholeModel, stage: int, nodes: Sequence[int], writers: Sequence[int], positions: Mapping[str, int]
) -> bool:
    """Whether a stage has all writers of some memory, and defines all that its own nodes of that memory use and nodes define."""
    own_nodes = {node_number for node_number in nodes if stage in model.stages_of[node_number]}
    members = set(nodes)
    used = {name for number in own_nodes for name in input_names(model.nodes[number].node)}
    used_positions = {positions[name] for name in used if name in positions}
    return own_nodes.issuperset(writers) and own_nodes.issuperset(used_positions & members)


def _joined(model: _WholeModel) -> Graph:
    """The nodes of the whole model in one graph, with the weights of all stages."""
    assembler = GraphAssembler(())
    nodes = [assembler.add_node(model.graphs[node_copy.stage_number], node_copy.node) for node_copy in model.nodes]
    weights = {weight.value: weight for graph in model.graphs for weight in graph.weights}
    return assembler.finish(nodes, model.entry_point.inputs, tuple(weights.values()), ())
