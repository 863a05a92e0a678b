"""The names that stand in a part of a graph, in a fixed order: those that templates of a region may vary."""

from collections.abc import Iterator

from stagepack.format.folded import Region
from stagepack.format.graph import Node, Value, Weight
from stagepack.format.shapes import symbols_in
from stagepack.format.walk import values_used


def value_texts(value: Value) -> Iterator[str]:
    """Yield the names in a value: its own, and those of symbols."""
    yield value.name
    for dim in value.shape:
        yield from symbols_in(dim)
    if value.expr is not None:
        yield from symbols_in(value.expr)


def node_texts(node: Node) -> Iterator[str]:
    """Yield the names in a node: of the values that it is given, and those in the values that it makes."""
    yield from values_used(node)
    for value in node.outputs:
        if value is not None:
            yield from value_texts(value)


def weight_texts(weight: Weight) -> Iterator[str]:
    """Yield the names in a weight."""
    yield weight.value
    yield from weight.names
    if weight.base is not None:
        yield weight.base


def region_texts(region: Region) -> Iterator[str]:
    """Yield the templates of a region."""
    for item in region.nodes:
        yield from node_texts(item) if isinstance(item, Node) else item.holes
    yield from (scope.path for scope in region.scopes)
    for weight in region.weights:
        yield from weight_texts(weight)
