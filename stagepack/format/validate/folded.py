"""The rules on regions and region calls, which are checked before a graph is unfolded (SPEC F1 to F4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.folded_graph import Hole, TemplateError, names_in_region, parse_template
from stagepack.format.graph import Argument, FoldedGraph, Node, Region, RegionCall
from stagepack.format.rules import BrokenRule
from stagepack.format.shapes import Dim, Expr
from stagepack.format.traversal import child_arguments
from stagepack.format.tree import Tree, child_trees
from stagepack.format.validate.types import check_depth


@dataclass(frozen=True, slots=True)
class _RegionFacts:
    """Facts about a region that the checks of its callers need."""

    hole_count: int  # the number of texts that a region call must have
    depth: int  # the number of nested region calls, itself included
    item_count: int  # what one region call unfolds to, as `limits.UNFOLDED_ITEMS` counts it


def check_folded(folded: FoldedGraph, file_name: str) -> Iterator[Problem]:
    """Yield the problems of the regions of a graph. If there are none, `unfold_graph` needs bounded memory."""
    for rule, location, message in _check(folded):
        yield Problem(rule=rule, where=f"{file_name}: {location}", message=message)


def _check(folded: FoldedGraph) -> Iterator[BrokenRule]:
    facts: list[_RegionFacts] = []
    called: set[int] = set()
    for region_index, region in enumerate(folded.regions):
        location = f"region {region_index}"
        templates = list(names_in_region(region))
        yield from _check_region(region, templates, location)
        yield from _check_calls(region, facts, location)
        nested = _called_regions(region, len(facts))
        called.update(nested)
        facts.append(
            _RegionFacts(
                hole_count=_hole_count(templates),
                depth=1 + max((facts[nested_index].depth for nested_index in nested), default=0),
                item_count=_item_count(region, len(templates))
                + sum(facts[nested_index].item_count for nested_index in nested),
            )
        )
        if facts[-1].depth > limits.NESTING_DEPTH:
            yield "L2", location, f"region calls are nested deeper than {limits.NESTING_DEPTH}"
    yield from _check_calls(folded, facts, "nodes")
    outer = _called_regions(folded, len(facts))
    if sum(facts[called_index].item_count for called_index in outer) > limits.UNFOLDED_ITEMS:
        message = f"more than {limits.UNFOLDED_ITEMS} nodes, arguments, outputs, names and parts of dimensions"
        yield "L1", "nodes", f"the region calls unfold to {message}"
    for region_index in sorted(set(range(len(facts))).difference(called, outer)):
        yield "F4", f"region {region_index}", "no region call calls it"
    if folded.regions and not all(0 <= scope_index < len(folded.scopes) for scope_index in _scope_indices(folded)):
        yield "G4", "nodes", "the scope of a node is not in the table"


def _check_region(region: Region, templates: Sequence[str], location: str) -> Iterator[BrokenRule]:
    """Yield the problems of a region by itself."""
    for template in dict.fromkeys(templates):
        try:
            parse_template(template)
        except TemplateError as error:
            yield "F2", location, str(error)
    if any(isinstance(item, Node) and not 0 <= item.scope < len(region.scopes) for item in region.nodes):
        yield "G4", location, "the scope of a node is not in the table of the region"
    for call in region.calls:
        if call.signature is not None:
            yield from check_depth(call.signature, location)


def _check_calls(
    body: FoldedGraph | Region, callable_regions: Sequence[_RegionFacts], location: str
) -> Iterator[BrokenRule]:
    """Yield the problems of the region calls of a graph or a region, which may call the first regions only."""
    for call in body.nodes:
        if isinstance(call, Node):
            continue
        if not 0 <= call.region < len(callable_regions):
            yield "F1", location, f"a region call names region {call.region}, which is not defined before it"
        elif len(call.holes) != callable_regions[call.region].hole_count:
            expected = callable_regions[call.region].hole_count
            yield "F3", location, f"expected {expected} texts for region {call.region}, found {len(call.holes)}"


def _called_regions(body: FoldedGraph | Region, region_count: int) -> list[int]:
    """The indices of the called regions, with repeats; indices that are not below `region_count` are left out."""
    return [item.region for item in body.nodes if isinstance(item, RegionCall) and 0 <= item.region < region_count]


def _hole_count(templates: Sequence[str]) -> int:
    """One more than the largest index of a hole; templates that cannot be parsed are left out."""
    hole_count = 0
    for template in dict.fromkeys(templates):
        try:
            parts = parse_template(template)
        except TemplateError:
            continue
        hole_count = max([hole_count, *(part.text_index + 1 for part in parts if isinstance(part, Hole))])
    return hole_count


def _scope_indices(folded: FoldedGraph) -> Iterator[int]:
    """Yield the scope indices of the nodes that no region has."""
    for subgraph in folded.subgraphs:
        yield from (node.scope for node in subgraph.nodes)
    yield from (item.scope for item in folded.nodes if isinstance(item, Node))


def _item_count(region: Region, name_count: int) -> int:
    """What one call of a region adds to the graph, without what nested region calls add; see `limits.UNFOLDED_ITEMS`."""
    nodes = [item for item in region.nodes if isinstance(item, Node)]
    outputs = [output for node in nodes for output in node.outputs]
    arguments = (argument for node in nodes for argument in (*node.args, *(argument for _, argument in node.kwargs)))
    signatures = (call.signature for call in region.calls if call.signature is not None)
    tree_count = sum(_tree_size(tree) for signature in signatures for tree in signature.trees)
    argument_count = sum(map(_argument_size, arguments))
    dims = (dim for output in outputs if output is not None for dim in (*output.shape, output.expr))
    output_count = len(outputs) + sum(_dim_size(dim) for dim in dims if dim is not None)
    return len(region.nodes) + argument_count + output_count + name_count + tree_count


def _tree_size(tree: Tree) -> int:
    return 1 + sum(map(_tree_size, child_trees(tree)))


def _dim_size(dim: Dim) -> int:
    """The integers and operations in a dimension. Its symbols are counted as names."""
    if isinstance(dim, str):
        return 0
    return 1 + sum(map(_dim_size, dim.args)) if isinstance(dim, Expr) else 1


def _argument_size(argument: Argument) -> int:
    return 1 + sum(map(_argument_size, child_arguments(argument)))
