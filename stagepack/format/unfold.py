"""Unfold a graph: replace the region calls of a graph file by nodes (SPEC F1 to F5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.folded import FoldedGraph, Region, RegionCall
from stagepack.format.graph import Argument, Graph, ModuleCall, Node, Scope, Subgraph, Value, ValueArg, Weight
from stagepack.format.renaming import (
    names_in_region,
    names_in_value,
    rename_module_call,
    rename_value,
    rename_weight,
)
from stagepack.format.template import TemplateError, fill_template, has_holes
from stagepack.format.traversal import input_names, leaf_arguments, map_arguments, sort_module_calls

_T = TypeVar("_T")
# Template of a region -> the name that it is filled to in one region call.
_Names = Mapping[str, str]
# Builds a node from the names of a region call, and from the index of each scope of the region in the scope table of the graph.
_NodeBuilder = Callable[[_Names, list[int]], Node]


def unfold_graph(folded: FoldedGraph, file_name: str = "", *, module_calls: bool = True) -> Graph:
    """Replace all region calls of a graph by the nodes of their regions.

    The tables of the result have a fixed order: scopes by path and type; weights by their first use, and after them the weights that no
    node uses; module calls by their first node. A graph without regions keeps its order.
    """
    fields = {field_name: getattr(folded, field_name) for field_name in Graph.__struct_fields__}
    if not module_calls:
        fields["calls"] = ()
    if not folded.regions:
        return Graph(**fields)
    try:
        steps = list(_Unfolding(folded.regions, module_calls=module_calls).steps(folded))
        added_calls = [rename_module_call(call, step.filled_names.__getitem__) for step in steps for call in step.calls]
    except TemplateError as error:
        raise FormatError([Problem(rule="F5", where=file_name, message=str(error))]) from None
    except _TooManyCharactersError as error:
        raise LimitError([Problem(rule="L1", where=file_name, message=str(error))]) from None
    # All steps of one region call have one list of scopes. A region call may have as many steps as scopes.
    scope_lists = {id(step.scopes): step.scopes for step in steps}
    scopes = sorted({*folded.scopes, *(scope for listed in scope_lists.values() for scope in listed)}, key=_scope_order)
    index_of_scope = {scope: scope_index for scope_index, scope in enumerate(scopes)}
    index_lists = {key: [index_of_scope[scope] for scope in listed] for key, listed in scope_lists.items()}
    nodes: list[Node] = []
    for step in steps:
        scope_indices = index_lists[id(step.scopes)]
        nodes += (build(step.filled_names, scope_indices) for build in step.node_builders)
    added_weights = (weight for step in steps for weight in step.weights)
    weights = {weight.value: weight for weight in (*folded.weights, *added_weights)}
    used = dict.fromkeys(value_name for node in nodes for value_name in input_names(node) if value_name in weights)
    fields |= {
        "nodes": tuple(nodes),
        "scopes": tuple(scopes),
        "weights": tuple(
            weights[value_name] for value_name in (*used, *(unused for unused in weights if unused not in used))
        ),
        "subgraphs": _subgraphs_with_scopes(folded, [index_of_scope[scope] for scope in folded.scopes]),
        "calls": sort_module_calls((*fields["calls"], *added_calls)),
    }
    return Graph(**fields)


def _subgraphs_with_scopes(folded: FoldedGraph, scope_indices: Sequence[int]) -> tuple[Subgraph, ...]:
    """The subgraphs with other scope indices: `scope_indices` has the new index of each scope."""
    return tuple(
        replace(subgraph, nodes=tuple(replace(node, scope=scope_indices[node.scope]) for node in subgraph.nodes))
        for subgraph in folded.subgraphs
    )


def _scope_order(scope: Scope) -> tuple[str, str]:
    return scope.path, scope.type


@dataclass(frozen=True, slots=True)
class _Step:
    """A run of nodes between region calls, or the weights and module calls that one region call adds.

    Attributes:
        node_builders: build the nodes.
        filled_names: the filled templates of the region call that the nodes belong to.
        scopes: the scopes that the nodes refer to.
        weights: the weights that the region call adds.
        calls: the module calls that the region call adds, with templates.
    """

    node_builders: Sequence[_NodeBuilder]
    filled_names: _Names
    scopes: list[Scope]
    weights: list[Weight] = field(default_factory=list)
    calls: Sequence[ModuleCall] = ()


class _TooManyCharactersError(Exception):
    """The names that region calls are filled to are too long altogether."""


class _Unfolding:
    """Unfolds region calls. The nodes of a region are compiled once to functions, which build the nodes of each region call."""

    def __init__(self, regions: Sequence[Region], *, module_calls: bool) -> None:
        self._regions = regions if module_calls else [replace(region, calls=()) for region in regions]
        self._templates = [sorted(set(names_in_region(region))) for region in self._regions]
        self._builders = [
            [_filled_node_builder(item) for item in region.nodes if isinstance(item, Node)] for region in regions
        ]
        self._character_count = 0

    def steps(self, folded: FoldedGraph) -> Iterator[_Step]:
        """Yield the steps that build the nodes of a graph, in order."""
        builders = [_kept_node_builder(item) for item in folded.nodes if isinstance(item, Node)]
        return self._body_steps(folded.nodes, builders, list(folded.scopes), {})

    def _body_steps(
        self,
        items: Sequence[Node | RegionCall],
        builders: Sequence[_NodeBuilder],
        scopes: list[Scope],
        filled_names: _Names,
    ) -> Iterator[_Step]:
        """Yield the steps of a graph or of one region call; `builders` are those of the nodes among the items."""
        step_start = node_count = 0
        for item in items:
            if isinstance(item, Node):
                node_count += 1
                continue
            if step_start < node_count:
                yield _Step(builders[step_start:node_count], filled_names, scopes)
            step_start = node_count
            yield from self._call_steps(item.region, [filled_names.get(hole, hole) for hole in item.holes])
        if step_start < node_count or scopes:
            yield _Step(builders[step_start:], filled_names, scopes)

    def _call_steps(self, region_index: int, hole_texts: list[str]) -> Iterator[_Step]:
        region = self._regions[region_index]
        filled_names = {template: fill_template(template, hole_texts) for template in self._templates[region_index]}
        self._character_count += sum(map(len, filled_names.values()))
        if self._character_count > limits.UNFOLDED_CHARACTERS:
            raise _TooManyCharactersError(f"names are filled to over {limits.UNFOLDED_CHARACTERS} characters")
        weights = [rename_weight(weight, filled_names.__getitem__) for weight in region.weights]
        if weights or region.calls:
            yield _Step([], filled_names, [], weights, region.calls)
        scopes = [Scope(path=filled_names[scope.path], type=scope.type) for scope in region.scopes]
        yield from self._body_steps(region.nodes, self._builders[region_index], scopes, filled_names)


def _kept_node_builder(node: Node) -> _NodeBuilder:
    """The builder of a node of the graph itself, whose names are not templates."""

    def build(_: _Names, scope_indices: list[int]) -> Node:
        return replace(node, scope=scope_indices[node.scope])

    return build


def _filled_node_builder(node: Node) -> _NodeBuilder:
    """The builder of a node of a region. Arguments and outputs without holes are shared by all nodes that it builds."""
    keys = [key for key, _ in node.kwargs]
    fill_args = _tuple_filler(node.args, _argument_filler)
    fill_kwargs = _tuple_filler([argument for _, argument in node.kwargs], _argument_filler)
    fill_outputs = _tuple_filler(node.outputs, _value_filler)

    def build(filled_names: _Names, scope_indices: list[int]) -> Node:
        return Node(
            op=node.op,
            args=fill_args(filled_names),
            kwargs=tuple(zip(keys, fill_kwargs(filled_names), strict=True)),
            outputs=fill_outputs(filled_names),
            unpack=node.unpack,
            scope=scope_indices[node.scope],
            context=node.context,
            cost=node.cost,
        )

    return build


def _tuple_filler(
    items: Sequence[_T], filler_of: Callable[[_T], Callable[[_Names], _T] | None]
) -> Callable[[_Names], tuple[_T, ...]]:
    """A function that fills all items; `filler_of` returns the function that fills one item, or None for an item without holes."""
    pairs = [(item, filler_of(item)) for item in items]
    if all(fill is None for _, fill in pairs):
        unchanged = tuple(items)
        return lambda _: unchanged
    return lambda filled_names: tuple([item if fill is None else fill(filled_names) for item, fill in pairs])


def _argument_filler(argument: Argument) -> Callable[[_Names], Argument] | None:
    # The code for containers below would do for a value too, in twice the time; most arguments are values.
    if isinstance(argument, ValueArg):
        template = argument.name
        return (lambda filled_names: ValueArg(filled_names[template])) if has_holes(template) else None
    if not any(isinstance(leaf, ValueArg) and has_holes(leaf.name) for leaf in leaf_arguments(argument)):
        return None

    def fill(filled_names: _Names) -> Argument:
        return map_arguments(
            argument, lambda leaf: ValueArg(filled_names[leaf.name]) if isinstance(leaf, ValueArg) else leaf
        )

    return fill


def _value_filler(value: Value | None) -> Callable[[_Names], Value] | None:
    if value is None or not any(map(has_holes, names_in_value(value))):
        return None
    # Symbols seldom have holes. The shape is then the same in every region call.
    template, *symbols = names_in_value(value)
    if not any(map(has_holes, symbols)):
        return lambda filled_names: replace(value, name=filled_names[template])
    return lambda filled_names: rename_value(value, filled_names.__getitem__)
