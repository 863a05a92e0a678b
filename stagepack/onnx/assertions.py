"""Assertions of a stage on its values, for which ONNX has no operator: the exporter leaves them out."""

from collections.abc import Collection

from stagepack.format import limits
from stagepack.format.graph import Argument, Graph, Node, ValueArg
from stagepack.format.shapes import Dim, Guard

_ASSERTED_SCALAR = "aten._assert_scalar.default"
_RANGE_ASSERTIONS = ("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default")
_SIZES = ("aten.sym_size.int", "aten.sym_numel.default")
_ASSERTIONS = frozenset({_ASSERTED_SCALAR, *_RANGE_ASSERTIONS, "aten._assert_async.default", "aten._assert_async.msg"})
# The relation, and whether its operands are exchanged.
_RELATIONS = {
    "operator.eq": ("eq", False),
    "operator.ne": ("ne", False),
    "operator.lt": ("lt", False),
    "operator.le": ("le", False),
    "operator.gt": ("lt", True),
    "operator.ge": ("le", True),
}


def lost_assertion(graph: Graph, guards: Collection[Guard]) -> str | None:
    """Return what a stage asserts and ONNX cannot; None where all that it asserts is a guard, or holds for all inputs."""
    nodes = [*graph.nodes, *(node for subgraph in graph.subgraphs for node in subgraph.nodes)]
    scalars = _Scalars(graph)
    for node in nodes:
        operator_name = graph.ops[node.op].name
        if operator_name in _ASSERTIONS and not scalars.is_needless(node, operator_name, guards):
            path = graph.scopes[node.scope].path or "the model itself"
            message = f" ({node.args[1]})" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
            return f"no ONNX form of {operator_name} in {path}{message}"
    return None


class _Scalars:
    """The symbolic scalars of a stage: the nodes that define them, and their dimensions."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._definitions = {value.name: node for node in graph.nodes for value in filter(None, node.outputs)}
        self._dims = {value.name: value.expr for node in graph.nodes for value in filter(None, node.outputs)}
        self._dims |= {value.name: value.expr for value in graph.inputs}
        self._symbols = {symbol.name: symbol for symbol in graph.symbols}

    def is_needless(self, node: Node, operator_name: str, guards: Collection[Guard]) -> bool:
        """Whether what a node asserts is a guard, or always holds."""
        if operator_name in _RANGE_ASSERTIONS:
            bounds = dict(zip(("size", "min", "max"), node.args, strict=False)) | dict(node.kwargs)
            return bounds.get("max") is None and self._is_at_most(bounds.get("min") or 0, bounds["size"])
        asserted = node.args[0] if operator_name == _ASSERTED_SCALAR else None
        definition = self._definition(asserted)
        relation, is_swapped = _RELATIONS.get(self._operator_name(definition), ("", False))
        if definition is None or not relation:
            return False
        lower, upper = definition.args[::-1] if is_swapped else definition.args
        left, right = self._dim(lower), self._dim(upper)
        if left is not None and right is not None and Guard(left=left, relation=relation, right=right) in guards:
            return True
        return relation == "le" and self._is_at_most(lower, upper)

    def _is_at_most(self, lower: Argument, upper: Argument) -> bool:
        """Whether an integer is at most another for all inputs."""
        highest, lowest = self._bounds(lower)[1], self._bounds(upper)[0]
        return highest is not None and lowest is not None and highest <= lowest

    def _bounds(self, argument: Argument) -> tuple[int | None, int | None]:
        """The smallest and the largest value of an integer, as far as the ranges of the inputs decide."""
        dim = self._dim(argument)
        if isinstance(dim, int):
            return dim, dim
        symbol = self._symbols.get(dim) if isinstance(dim, str) else None
        if symbol is not None and symbol.example is not None:
            return symbol.min, limits.TENSOR_ELEMENTS if symbol.max is None else symbol.max
        # The range of an integer that depends on data is what the assertions check, but a size is at least 0.
        is_size = self._operator_name(self._definition(argument)) in _SIZES
        return (0, limits.TENSOR_ELEMENTS) if is_size else (None, None)

    def _definition(self, argument: Argument) -> Node | None:
        return self._definitions.get(argument.name) if isinstance(argument, ValueArg) else None

    def _operator_name(self, definition: Node | None) -> str:
        return "" if definition is None else self._graph.ops[definition.op].name

    def _dim(self, argument: Argument) -> Dim | None:
        if isinstance(argument, ValueArg):
            return self._dims.get(argument.name)
        return argument if isinstance(argument, int) and not isinstance(argument, bool) else None
