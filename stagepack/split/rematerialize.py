"""Compute sizes again where they are used, so that no symbolic integer crosses an edge beside a tensor that has the size.

The copy of a node keeps the names of its values: joining the stages finds each value once more and drops the copy.
"""

from collections.abc import Mapping, Sequence

from stagepack.format.graph import Argument, Graph, Node, Value, ValueArg
from stagepack.format.operators import namespace
from stagepack.format.walk import values_made, values_used

_SIZE_OF = "aten.sym_size.int"


def rematerialize_sizes(graph: Graph, parts: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Put nodes that compute sizes in front of the stages that would receive them; `parts` are the nodes of each stage."""
    size_of = next((index for index, op in enumerate(graph.ops) if op.name == _SIZE_OF), None)
    if size_of is None:
        return [list(part) for part in parts]
    made = {value.name: value for node in graph.nodes for value in node.outputs if value is not None}
    makers = {name: node for node in graph.nodes for name in values_made(node)}
    known = {value.name: value for value in graph.inputs} | made
    return [_Sizes(graph, size_of, makers, known, part).front() + list(part) for part in parts]


class _Sizes:
    """The sizes that one stage can compute from the tensors that it receives."""

    def __init__(
        self, graph: Graph, size_of: int, makers: Mapping[str, Node], known: Mapping[str, Value], part: Sequence[Node]
    ) -> None:
        self.graph = graph
        self.size_of = size_of
        self.makers = makers
        own = {name for node in part for name in values_made(node)}
        received = [
            known[name]
            for name in dict.fromkeys(name for node in part for name in values_used(node))
            if name in known and name not in own
        ]
        self.wanted = [value for value in received if value.dtype == "symint"]
        self.tensors = [value for value in received if value.dtype not in ("symint", "symfloat", "symbool")]
        self.nodes: list[Node] = []
        self.here: set[str] = set()

    def front(self) -> list[Node]:
        for value in self.wanted:
            self._compute(value)
        return self.nodes

    def _compute(self, value: Value) -> bool:
        """Append the nodes that make a size here; False when the stage must receive it."""
        if value.name in self.here:
            return True
        node = self._read(value) or self._copy(value)
        if node is not None:
            self.nodes.append(node)
            self.here.update(values_made(node))
        return node is not None

    def _read(self, value: Value) -> Node | None:
        """A node that reads the size off a tensor, when one has it."""
        if value.expr is None:
            return None
        for tensor in self.tensors:
            if value.expr in tensor.shape:
                args: tuple[Argument, ...] = (ValueArg(tensor.name), tensor.shape.index(value.expr))
                return Node(
                    op=self.size_of,
                    args=args,
                    outputs=(value,),
                    scope=self.makers[value.name].scope if value.name in self.makers else 0,
                )
        return None

    def _copy(self, value: Value) -> Node | None:
        """The node of Python arithmetic that makes the size, when all it is given can be made here."""
        node = self.makers.get(value.name)
        if node is None or namespace(self.graph.ops[node.op].name) not in ("operator", "math", "torch"):
            return None
        given = (
            [
                output
                for name in values_used(node)
                for output in self.makers[name].outputs
                if output is not None and output.name == name
            ]
            if all(name in self.makers for name in values_used(node))
            else None
        )
        if given is None or not all(self._compute(part) for part in given):
            return None
        return node
