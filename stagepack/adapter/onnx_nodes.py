"""Nodes and tensors that are added to an ONNX model, as bytes of its messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.protobuf import Field, join_message

# Field numbers of onnx.proto.
NODE_INPUT, NODE_OUTPUT, NODE_OPERATOR, _NODE_ATTRIBUTE = 1, 2, 4, 5
_INTEGER_ATTRIBUTE, _GRAPH_ATTRIBUTE = 2, 5
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor with those of all adapters, an initializer of the model.

    Attributes:
        target: the changed module, or the replaced weight.
        role: ``a`` [adapters, in, rank], or [adapters * in, rank] of an embedding, ``b`` [adapters, rank, out], ``bias``
            [adapters, 1, out], ``scale`` and ``has``, whether an adapter changes the module, [adapters, 1, 1]. Of a replaced weight:
            ``whole``, its values by the adapters that replace it, ``place``, which of them an adapter has, and ``replaces``, whether it
            has one, [adapters].
        dtype: the torch name of its dtype.
        start: its first byte in the file of the stacked tensors.
    """

    name: str
    target: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def encoded(name: str) -> bytes:
    """Return a name as bytes; those that are no text are as they were read."""
    return name.encode("utf-8", "surrogateescape")


def rows_input(name: str) -> bytes:
    """Return an input of a model, int64 [rows]."""
    dimension = join_message([Field(2, b"adapter rows")])
    tensor_type = join_message([Field(1, ELEMENT_TYPES["int64"]), Field(2, join_message([Field(1, dimension)]))])
    return join_message([Field(1, encoded(name)), Field(2, join_message([Field(1, tensor_type)]))])


class AddedNodes:
    """Nodes of a model, to which others are added.

    Attributes:
        nodes: the nodes, in order.
        initializers: the tensors that are added.
        tensors: those of them that are in the file of the stacked tensors.
        byte_count: the size of this file.
    """

    def __init__(self, prefix: str, rows_name: str, file_name: str) -> None:
        self.nodes: list[Sequence[Field]] = []
        self.initializers: list[bytes] = []
        self.tensors: list[StackedTensor] = []
        self.byte_count = 0
        self._prefix, self._rows_name, self._file_name = prefix, rows_name, file_name
        self._known: dict[object, str] = {}

    def new_name(self) -> str:
        """Return a name that no value has."""
        return f"{self._prefix}.{len(self.nodes)}.{len(self._known)}"

    def add(
        self,
        operator: str,
        inputs: Sequence[str],
        attributes: Mapping[str, int | bytes] | None = None,
        output: str | None = None,
    ) -> str:
        """Append a node, and return the name of its result. An attribute is an integer, or the message of a graph."""
        output = output or self.new_name()
        self.nodes.append(_node(operator, inputs, attributes or {}, output))
        return output

    def cast(self, x: str, dtype: str) -> str:
        """Append a conversion."""
        return self.add("Cast", [x], {"to": ELEMENT_TYPES[dtype]})

    def by_row(self, x: str, rows: str, size: int) -> str:
        """Append what makes a tensor one of [rows, any, size]."""
        key = "shape", rows, size
        if key not in self._known:
            self._known[key] = self.add("Concat", [self.add("Shape", [rows]), self.integers(-1, size)], {"axis": 0})
        return self.add("Reshape", [x, self._known[key]])

    def first_row(self) -> str:
        """Return the number of the adapter of the first row, [1]."""
        if "first" not in self._known:
            self._known["first"] = self.add("Slice", [self._rows_name, self.integers(0), self.integers(1)])
        return self._known["first"]

    def integers(self, *values: int) -> str:
        """Return a constant tensor of integers, [values]."""
        if values not in self._known:
            name = self._known[values] = self.new_name()
            content = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
            fields = [Field(1, len(values)), Field(2, ELEMENT_TYPES["int64"]), Field(8, encoded(name))]
            self.initializers.append(join_message([*fields, Field(9, content)]))
        return self._known[values]

    def stacked(self, target: str, role: str, shape: tuple[int, ...], dtype: str) -> str:
        """Return the stacked tensor of a role, which all uses of a module or a weight share."""
        if (target, role) not in self._known:
            name = self._known[target, role] = self.new_name()
            start, length = -(-self.byte_count // _ALIGNMENT) * _ALIGNMENT, math.prod(shape) * ITEM_SIZE[dtype]
            self.tensors.append(StackedTensor(name, target, role, dtype, shape, start))
            self.byte_count = start + length
            entries = {"location": self._file_name, "offset": str(start), "length": str(length)}
            places = [
                Field(13, join_message([Field(1, encoded(key)), Field(2, encoded(text))]))
                for key, text in entries.items()
            ]
            fields = [*(Field(1, size) for size in shape), Field(2, ELEMENT_TYPES[dtype]), Field(8, encoded(name))]
            self.initializers.append(join_message([*fields, *places, Field(14, 1)]))
        return self._known[target, role]

    def choose(self, condition: str, chosen: "tuple[str, Sequence[str]]", other: str, output: str) -> None:
        """Append a choice: the result of an operator on some inputs, or, where a condition does not hold, another value."""
        operator, inputs = chosen
        branches = {
            "then_branch": self._branch(operator, inputs),
            "else_branch": self._branch("Identity", [other]),
        }
        self.add("If", [condition], branches, output)

    def _branch(self, operator: str, inputs: Sequence[str]) -> bytes:
        name = self.new_name() + operator
        node = join_message(_node(operator, inputs, {}, name))
        result = join_message([Field(1, encoded(name))])
        return join_message([Field(1, node), Field(2, encoded(name)), Field(12, result)])


def _node(operator: str, inputs: Sequence[str], attributes: Mapping[str, int | bytes], output: str) -> list[Field]:
    return [
        *(Field(NODE_INPUT, encoded(name)) for name in inputs),
        Field(NODE_OUTPUT, encoded(output)),
        Field(NODE_OPERATOR, encoded(operator)),
        *(Field(_NODE_ATTRIBUTE, _attribute(name, value)) for name, value in attributes.items()),
    ]


def _attribute(name: str, value: int | bytes) -> bytes:
    is_integer = isinstance(value, int)
    content = Field(3, value) if is_integer else Field(6, value)
    return join_message(
        [Field(1, encoded(name)), content, Field(20, _INTEGER_ATTRIBUTE if is_integer else _GRAPH_ATTRIBUTE)]
    )
