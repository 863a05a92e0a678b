"""The graph as its file stores it: equal runs of nodes are stored once, as regions that are called (SPEC section 7, F1 to F5).

A region is a run of nodes with templates in the place of names. A region call fills the holes of the templates, which gives the nodes
of one occurrence. Unfolding a graph replaces every region call by these nodes.
"""

from typing import NamedTuple

from msgspec import Struct

from stagepack.format.graph import Context, Graph, ModuleCall, Node, Op, Scope, Subgraph, Value, Weight
from stagepack.format.limits import Int64
from stagepack.format.shapes import Symbol


class RegionCall(NamedTuple):
    """One occurrence of a region: the index of the region, and the texts for its holes. In a region these texts are templates too."""

    region: Int64
    holes: tuple[str, ...]


class Region(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of nodes that occurs in the graph several times.

    The names of values, symbols, weights, scopes and module calls are templates. ``{2}`` is the third text of the region call;
    ``{2+5}`` is this text as a number, plus 5; ``{{`` and ``}}`` are braces.

    Attributes:
        nodes: the nodes. They refer to the scopes of the region, and to the operators, contexts and subgraphs of the graph.
        weights: the weights that each region call adds to the graph.
        scopes: the scopes of the nodes.
        calls: the module calls that each region call adds to the graph.
    """

    nodes: tuple[Node | RegionCall, ...]
    weights: tuple[Weight, ...] = ()
    scopes: tuple[Scope, ...] = ()
    calls: tuple[ModuleCall, ...] = ()


class FoldedGraph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a `Graph`, with region calls among its nodes, and the regions.

    Attributes:
        symbols: see `Graph`.
        inputs: see `Graph`.
        weights: the weights that no region call adds.
        nodes: nodes and region calls, in execution order.
        outputs: see `Graph`.
        subgraphs: see `Graph`.
        ops: see `Graph`.
        scopes: the scopes of the nodes that no region call adds.
        contexts: see `Graph`.
        calls: the module calls that no region call adds.
        regions: the regions. A region may call the regions before it.
    """

    symbols: tuple[Symbol, ...] = ()
    inputs: tuple[Value, ...] = ()
    weights: tuple[Weight, ...] = ()
    nodes: tuple[Node | RegionCall, ...] = ()
    outputs: tuple[str, ...] = ()
    subgraphs: tuple[Subgraph, ...] = ()
    ops: tuple[Op, ...] = ()
    scopes: tuple[Scope, ...] = ()
    contexts: tuple[Context, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    regions: tuple[Region, ...] = ()


def trivially_folded(graph: Graph) -> FoldedGraph:
    """Return a graph as its file may store it, without regions.

    Law: ``unfold_graph(trivially_folded(graph)) == graph``.
    """
    return FoldedGraph(**{field: getattr(graph, field) for field in Graph.__struct_fields__})
