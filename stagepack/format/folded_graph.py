"""The graph as its file stores it, where equal runs of nodes are stored once, and how it is unfolded (SPEC section 7, F1 to F5).

A region is a run of nodes with templates in the place of names. A region call fills the holes of the templates, such as in
``layers.{0}.norm`` and ``add_{1+3}``, which gives the nodes of one occurrence. Unfolding a graph replaces every region call by these nodes.

The names in nodes, values, weights and module calls, which the templates may vary, are listed and replaced in one order. Law for each
function `rename_x`: ``names_in(rename_x(x, rename), rename_x) == [rename(name) for name in names_in(x, rename_x)]``.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from stagepack.format import limits
from stagepack.format.graph import (
    Argument,
    FoldedGraph,
    Graph,
    ModuleCall,
    Node,
    Region,
    RegionCall,
    Scope,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.rules import rule_error
from stagepack.format.shapes import rename_symbols
from stagepack.format.traversal import (
    input_names,
    leaf_arguments,
    map_arguments,
    map_node_arguments,
    sort_module_calls,
    subgraphs_with_scopes,
)

# Possessive (++): what has matched is never given back, so that matching takes no memory for each character.
_TEMPLATE_PART = re.compile(
    r"\{(?P<text_index>0|[1-9][0-9]{0,5})(?P<increment>[+-][1-9][0-9]{0,17})?\}|(?P<literal>(?:[^{}]++|\{\{|\}\})++)"
)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_T = TypeVar("_T")
# Returns the new name for an old one.
Rename = Callable[[str], str]
# Template of a region -> the name that it is filled to in one region call.
_Names = Mapping[str, str]
# Builds a node from the names of a region call, and from the index of each scope of the region in the scope table of the graph.
_NodeBuilder = Callable[[_Names, list[int]], Node]


class TemplateError(ValueError):
    """A string is not a template, or its holes cannot be filled with the given texts."""


class Hole(NamedTuple):
    """A hole of a template. A region call fills it with one of its texts."""

    text_index: int
    increment: int = 0  # added to the text, which must then be a decimal number; 0 leaves the text as it is

    def __str__(self) -> str:
        """The hole as it is written in a template."""
        return f"{{{self.text_index}{self.increment:+d}}}" if self.increment else f"{{{self.text_index}}}"


def escape_template(literal: str) -> str:
    """Return the template without holes that is filled to `literal`."""
    return literal.replace("{", "{{").replace("}", "}}")


@lru_cache(maxsize=4096)
def parse_template(template: str) -> tuple[str | Hole, ...]:
    """Split a template into literal strings, with their braces unescaped, and holes."""
    if len(template) > limits.TEMPLATE_CHARACTERS:
        raise TemplateError(
            f"expected a template of at most {limits.TEMPLATE_CHARACTERS} characters, found {len(template)}: {template[:80]!r}"
        )
    parts: list[str | Hole] = []
    position = 0
    while position < len(template):
        match = _TEMPLATE_PART.match(template, position)
        if match is None:
            raise TemplateError(f"expected a template, found {template[:80]!r}")
        position = match.end()
        if match["literal"] is None:
            parts.append(Hole(int(match["text_index"]), int(match["increment"] or 0)))
        else:
            parts.append(match["literal"].replace("{{", "{").replace("}}", "}"))
    return tuple(parts)


def fill_template(template: str, hole_texts: Sequence[str]) -> str:
    """Fill the holes of a template."""
    parts = parse_template(template)
    filled = "".join([_filled(part, hole_texts) if isinstance(part, Hole) else part for part in parts])
    if len(filled) > limits.NAME_CHARACTERS:
        raise TemplateError(f"{template[:80]!r} is filled to over {limits.NAME_CHARACTERS} characters")
    return filled


def _filled(hole: Hole, hole_texts: Sequence[str]) -> str:
    if hole.text_index >= len(hole_texts):
        raise TemplateError(f"the hole {hole} has no text: the region call has {len(hole_texts)}")
    hole_text = hole_texts[hole.text_index]
    if len(hole_text) > limits.NAME_CHARACTERS:
        raise TemplateError(f"the text {hole_text[:80]!r} has over {limits.NAME_CHARACTERS} characters")
    if not hole.increment:
        return hole_text
    total = int(hole_text) + hole.increment if _DECIMAL.fullmatch(hole_text) else -1
    if total < 0:
        raise TemplateError(f"the hole {hole} cannot be filled with {hole_text[:80]!r}")
    return str(total)


def has_holes(template: str) -> bool:
    """Whether a template differs from the string that it is filled to: it has holes or escaped braces."""
    return "{" in template or "}" in template


def trivially_folded(graph: Graph) -> FoldedGraph:
    """Return a graph as its file may store it, without regions.

    Law: ``unfold_graph(trivially_folded(graph)) == graph``.
    """
    return FoldedGraph(**{field: getattr(graph, field) for field in Graph.__struct_fields__})


def rename_value(value: Value, rename: Rename) -> Value:
    """Return a value with another name, and other names of the symbols in its shape and its `expr`."""
    return replace(
        value,
        name=rename(value.name),
        shape=tuple([rename_symbols(dim, rename) for dim in value.shape]),
        expr=None if value.expr is None else rename_symbols(value.expr, rename),
    )


def rename_node(node: Node, rename: Rename) -> Node:
    """Return a node with other names of the values that it uses, and then of those that it defines."""

    def rename_leaf(leaf: Argument) -> Argument:
        return ValueArg(rename(leaf.name)) if isinstance(leaf, ValueArg) else leaf

    renamed = map_node_arguments(node, rename_leaf)
    outputs = [None if value is None else rename_value(value, rename) for value in node.outputs]
    return replace(renamed, outputs=tuple(outputs))


def rename_weight(weight: Weight, rename: Rename) -> Weight:
    """Return a weight with another value name, other names in the model, and another base."""
    return replace(
        weight,
        value=rename(weight.value),
        names=tuple([rename(weight_name) for weight_name in weight.names]),
        base=None if weight.base is None else rename(weight.base),
    )


def rename_module_call(call: ModuleCall, rename: Rename) -> ModuleCall:
    """Return a module call with another path, another position of its first node, and other value names in its signature."""
    return replace(
        call,
        path=rename(call.path),
        first=rename(call.first),
        signature=None if call.signature is None else call.signature.renamed(rename),
    )


def names_in(item: _T, rename_item: Callable[[_T, Rename], _T]) -> list[str]:
    """Return the names in an object, in the order in which one of the functions above renames them."""
    item_names: list[str] = []

    def record(item_name: str) -> str:
        item_names.append(item_name)
        return item_name

    rename_item(item, record)
    return item_names


def names_in_region(region: Region) -> Iterator[str]:
    """Yield the templates of a region, with repeats: of its nodes and region calls, scopes, weights and module calls."""
    for item in region.nodes:
        yield from names_in(item, rename_node) if isinstance(item, Node) else item.holes
    yield from (scope.path for scope in region.scopes)
    for weight in region.weights:
        yield from names_in(weight, rename_weight)
    for call in region.calls:
        yield from names_in(call, rename_module_call)


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
        raise rule_error("F5", file_name, str(error)) from None
    except _TooManyCharactersError as error:
        raise rule_error("L1", file_name, str(error)) from None
    # All steps of one region call have one list of scopes. A region call may have as many steps as scopes.
    scope_lists = {id(step.scopes): step.scopes for step in steps}
    added_scopes = (scope for listed in scope_lists.values() for scope in listed)
    scopes = sorted({*folded.scopes, *added_scopes}, key=lambda scope: (scope.path, scope.type))
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
        "subgraphs": subgraphs_with_scopes(folded.subgraphs, [index_of_scope[scope] for scope in folded.scopes]),
        "calls": sort_module_calls((*fields["calls"], *added_calls)),
    }
    return Graph(**fields)


@dataclass(frozen=True, slots=True)
class _Step:
    """A run of nodes between region calls, or the weights and module calls that one region call adds."""

    node_builders: Sequence[_NodeBuilder]  # build the nodes
    filled_names: _Names  # the filled templates of the region call that the nodes belong to
    scopes: list[Scope]  # the scopes that the nodes refer to
    weights: list[Weight] = field(default_factory=list)  # the weights that the region call adds
    calls: Sequence[ModuleCall] = ()  # the module calls that the region call adds, with templates


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
    if value is None:
        return None
    template, *symbols = names_in(value, rename_value)
    if not any(map(has_holes, (template, *symbols))):
        return None
    # Symbols seldom have holes. The shape is then the same in every region call.
    if not any(map(has_holes, symbols)):
        return lambda filled_names: replace(value, name=filled_names[template])
    return lambda filled_names: rename_value(value, filled_names.__getitem__)
