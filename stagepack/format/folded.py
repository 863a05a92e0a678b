"""A graph as its file holds it: what is equal but for names stands once, as a region that is called (SPEC section 7, F1 to F5).

A region is a run of nodes. Its texts are templates: a call fills their holes, which gives the nodes of one place. Unfolding, that
is filling in all calls, gives the graph; nothing else is needed to read one.
"""

from typing import NamedTuple

from msgspec import Struct

from stagepack.format.graph import Context, Graph, ModuleCall, Node, Op, Scope, Subgraph, Value, Weight
from stagepack.format.limits import Int64
from stagepack.format.shapes import Symbol


class RegionCall(NamedTuple):
    """The nodes of a region, with these texts in the holes. Inside a region the texts are templates themselves."""

    region: Int64
    holes: tuple[str, ...]


class Region(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of nodes that stands in the graph several times.

    In the names of values, symbols, weights, scopes and modules, ``{2}`` is the third text of a call, ``{2+5}`` the number that this
    text is, plus 5, and ``{{`` and ``}}`` are braces.

    Attributes:
        nodes: they refer to the scopes of the region, and to the operators, contexts and subgraphs of the graph.
        weights: those that each call has for itself.
        scopes: where the nodes came from.
        calls: the calls of modules that each call of the region has for itself.
    """

    nodes: tuple[Node | RegionCall, ...]
    weights: tuple[Weight, ...] = ()
    scopes: tuple[Scope, ...] = ()
    calls: tuple[ModuleCall, ...] = ()


class FoldedGraph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a `Graph`, and the regions that its nodes call; one region may call those before it."""

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
    """A graph as its file may hold it, with nothing folded."""
    return FoldedGraph(**{name: getattr(graph, name) for name in Graph.__struct_fields__})
