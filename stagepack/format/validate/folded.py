"""The rules on regions and their calls, before they are unfolded (SPEC F1 to F4)."""

from collections.abc import Iterator

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.folded import FoldedGraph, Region
from stagepack.format.graph import Argument, Node
from stagepack.format.renaming import names_in_region
from stagepack.format.template import Hole, TemplateError, parse_template
from stagepack.format.traversal import child_arguments
from stagepack.format.tree import Tree, child_trees
from stagepack.format.validate.problems import BrokenRule
from stagepack.format.validate.signature import check_depth


def check_folded(folded: FoldedGraph, where: str) -> Iterator[Problem]:
    """Yield the rules F that a graph breaks as its file holds it; `where` is the name of the file.

    When there are none it can be unfolded, in memory within the limits.
    """
    for rule, place, message in _folded(folded):
        yield Problem(rule=rule, where=f"{where}: {place}", message=message)


def _folded(folded: FoldedGraph) -> Iterator[BrokenRule]:
    holes: list[int] = []
    depths: list[int] = []
    sizes: list[int] = []
    called: set[int] = set()
    for number, region in enumerate(folded.regions):
        where = f"region {number}"
        holes.append(0)
        for template in dict.fromkeys(names_in_region(region)):
            try:
                used = [part.text_index for part in parse_template(template) if isinstance(part, Hole)]
            except TemplateError as error:
                yield "F2", where, str(error)
            else:
                holes[number] = max([holes[number], *(hole + 1 for hole in used)])
        if any(isinstance(item, Node) and not 0 <= item.scope < len(region.scopes) for item in region.nodes):
            yield "G4", where, "the scope of a node is not in the table of the region"
        signatures = (call.signature for call in region.calls if call.signature is not None)
        for signature in signatures:
            yield from check_depth(signature, where)
        yield from _calls(region, holes[:number], where)
        inner = [call.region for call in region.nodes if not isinstance(call, Node) and 0 <= call.region < number]
        called.update(inner)
        depths.append(1 + max((depths[index] for index in inner), default=0))
        sizes.append(_size(region) + sum(sizes[index] for index in inner))
        if depths[number] > limits.NESTING_DEPTH:
            yield "L2", where, f"calls of regions are nested deeper than {limits.NESTING_DEPTH}"
    yield from _calls(folded, holes, "nodes")
    outer = [call.region for call in folded.nodes if not isinstance(call, Node) and 0 <= call.region < len(sizes)]
    if sum(sizes[index] for index in outer) > limits.UNFOLDED_ITEMS:
        yield (
            "L1",
            "nodes",
            f"unfolded, the calls of regions have more than {limits.UNFOLDED_ITEMS} nodes, arguments and names",
        )
    for number in sorted(set(range(len(folded.regions))).difference(called, outer)):
        yield "F4", f"region {number}", "nothing calls it"
    numbers = (node.scope for body in folded.subgraphs for node in body.nodes)
    if folded.regions and not all(0 <= number < len(folded.scopes) for number in (*numbers, *_scopes(folded))):
        yield "G4", "nodes", "the scope of a node is not in the table"


def _scopes(folded: FoldedGraph) -> Iterator[int]:
    return (item.scope for item in folded.nodes if isinstance(item, Node))


def _calls(body: FoldedGraph | Region, holes: list[int], where: str) -> Iterator[BrokenRule]:
    """The rules on the calls of a body, which may call regions as many as there are `holes`."""
    for call in body.nodes:
        if isinstance(call, Node):
            continue
        if not 0 <= call.region < len(holes):
            yield "F1", where, f"calls region {call.region}, which does not stand before it"
        elif len(call.holes) != holes[call.region]:
            expected = holes[call.region]
            yield "F3", where, f"region {call.region} has {expected} holes, a call gives {len(call.holes)} texts"


def _size(region: Region) -> int:
    """How much a call of a region adds to the graph: nodes, arguments, names."""
    nodes = [item for item in region.nodes if isinstance(item, Node)]
    given = (argument for node in nodes for argument in (*node.args, *(argument for _, argument in node.kwargs)))
    signatures = (call.signature for call in region.calls if call.signature is not None)
    trees = sum(_count_tree(tree) for signature in signatures for tree in signature.trees)
    return len(region.nodes) + sum(map(_count, given)) + sum(1 for _ in names_in_region(region)) + trees


def _count_tree(tree: Tree) -> int:
    return 1 + sum(map(_count_tree, child_trees(tree)))


def _count(argument: Argument) -> int:
    return 1 + sum(map(_count, child_arguments(argument)))
