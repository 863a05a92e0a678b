"""Parse the parts of an ONNX file that rules are about, before a runtime opens it (SPEC O1 to O5).

The parser uses no library, for two reasons: a host that only checks bundles has none; and because this parser reads every field of a
message and refuses unknown fields, no other parser can find anything else in the file.

The field numbers come from onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). The encoding is Protocol
Buffers (https://protobuf.dev/programming-guides/encoding).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from stagepack.format import limits
from stagepack.format.protobuf import read_varint
from stagepack.format.rules import rule_error

# Prefixes of the names of inputs and outputs that are not edges: the content of a weight that the stage writes, its content after the
# call, and the content after the call of an input that the stage writes.
STATE_PREFIX, NEXT_STATE_PREFIX, WRITTEN_PREFIX = "state.", "next.", "written."

# torch dtype -> element type of ONNX
ELEMENT_TYPES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 1,
        "uint8": 2,
        "int8": 3,
        "uint16": 4,
        "int16": 5,
        "int32": 6,
        "int64": 7,
        "bool": 9,
        "float16": 10,
        "float64": 11,
        "uint32": 12,
        "uint64": 13,
        "bfloat16": 16,
        "float8_e4m3fn": 17,
        "float8_e4m3fnuz": 18,
        "float8_e5m2": 19,
        "float8_e5m2fnuz": 20,
        "float8_e8m0fnu": 24,
    }
)
# The dtypes of tensors that represent dtypes without an element type: symbolic scalars, and complex numbers as pairs of a real and an
# imaginary part.
SCALAR_TENSOR_DTYPES: Final = MappingProxyType({"symint": "int64", "symfloat": "float64", "symbool": "bool"})
COMPLEX_PART_DTYPES: Final = MappingProxyType({"complex64": "float32", "complex128": "float64"})

# Kind of field -> wire types that it may have. A field of the kind "bytes" holds a string, bytes, or a message that no rule is about.
# A kind with a star may occur several times; repeated numbers and floats may be packed. A "small_number" has 32 bits.
_WIRE_TYPES: Final[Mapping[str, frozenset[int]]] = {
    "number": frozenset({0}),
    "small_number": frozenset({0}),
    "bytes": frozenset({2}),
    "float": frozenset({5}),
    "number*": frozenset({0, 2}),
    "bytes*": frozenset({2}),
    "float*": frozenset({5, 2}),
    "double*": frozenset({1, 2}),
}


# Message types with the kinds of their fields, or the types of nested messages, and the numbers of the fields; a star marks repeated ones.
_MESSAGES: Final = """
    Model: number 1 5, bytes 2 3 4 6, bytes* 8 14 26, Graph 7
    Graph: bytes 2 10, bytes* 13 16, Node* 1, Tensor* 5, Value* 11 12
    Node: bytes 3 4 6 7, bytes* 1 2 9 10, Attribute* 5
    Attribute: bytes 1 4 13, bytes* 9, float 2, number 3, small_number 20, float* 7, number* 8, Tensor 5, Graph 6, Tensor* 10, Graph* 11
    Tensor: small_number 2 14, number* 1 5 7 11, bytes 8 9 12, bytes* 6 16, float* 4, double* 10, Entry* 13
    Value: bytes 1 3, bytes* 4, Type 2
    Type: bytes 6, TensorType 1
    TensorType: small_number 1, Shape 2
    Shape: Dimension* 1
    Dimension: number 1, bytes 2 3
    Entry: bytes 1 2
"""


def _fields(kinds: str) -> dict[int, str]:
    """The kind of each field, by field number."""
    words_of_kinds = (words.split() for words in kinds.split(","))
    return {int(field_number): kind for kind, *field_numbers in words_of_kinds for field_number in field_numbers}


# Message type -> field number -> kind of field, or the type of the nested message.
_MESSAGE_FIELDS: Final[Mapping[str, Mapping[int, str]]] = {
    message_type: _fields(kinds) for message_type, kinds in re.findall(r"(\w+): (.+)", _MESSAGES)
}

# A parsed message: the contents of each field in order, by field number. A nested message is parsed too.
_Message = dict[int, list[Any]]


@dataclass(frozen=True, slots=True)
class OnnxValue:
    """An input or output of an ONNX model."""

    name: str
    element_type: int
    shape: tuple[int | str, ...]  # its dimensions: integers, or texts such as the name of a symbol


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A tensor whose bytes are in another file."""

    name: str
    element_type: int
    shape: tuple[int, ...]
    location: str  # the name of the file
    offset: int  # its first byte, from the start of the file
    length: int  # its size in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """The parts of an ONNX file that rules are about."""

    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    operators: frozenset[tuple[str, str]]  # pairs of the domain and the name of each operator that a node calls
    unconditional: frozenset[str]  # the names of those that run whatever the conditions of branches are
    tensors: tuple[OnnxTensor, ...]  # the tensors whose bytes are in other files
    # Tensors of `tensors` that are initializers of its graph, and whose names no other tensor of the file has.
    initializers: tuple[OnnxTensor, ...]


def onnx_element_type(dtype: str) -> int | None:
    """Return the number of the ONNX element type that represents a dtype of this format; None if there is none."""
    return ELEMENT_TYPES.get(SCALAR_TENSOR_DTYPES.get(dtype, COMPLEX_PART_DTYPES.get(dtype, dtype)))


def parse_onnx_model(content: bytes, file_name: str) -> OnnxModel:
    """Parse the content of an ONNX file."""
    try:
        model = _Parser(content).parse(0, len(content), "Model", 0)
        [graph] = model[7]
        external = _ExternalReferences()
        for message_type, nested_message in _nested_messages("Model", model):
            external.add(message_type, nested_message)
        initializer_names = {_string(tensor, 8) for tensor in graph.get(5, [])}
        return OnnxModel(
            inputs=tuple(map(_onnx_value, graph.get(11, []))),
            outputs=tuple(map(_onnx_value, graph.get(12, []))),
            operators=frozenset(external.operators),
            unconditional=frozenset(_unconditional_operators(graph)),
            tensors=tuple(external.tensors),
            initializers=tuple(
                tensor
                for tensor in external.tensors
                if tensor.name in initializer_names and external.tensor_names[tensor.name] == 1
            ),
        )
    except _TooLargeError as error:
        rule, reason = error.args
        raise rule_error(rule, file_name, reason) from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        message = f"not an ONNX model of this format: {str(error)[:200]}"
        raise rule_error("O2", file_name, message) from None


@dataclass(slots=True)
class _ExternalReferences:
    """The operators and the files that the messages of a model refer to."""

    operators: set[tuple[str, str]] = field(default_factory=set)
    tensors: list[OnnxTensor] = field(default_factory=list)
    tensor_names: Counter[str] = field(default_factory=Counter)

    def add(self, message_type: str, message: _Message) -> None:
        if message_type == "Node":
            self.operators.add((_string(message, 7), _string(message, 4)))
        elif message_type == "Tensor":
            self.tensor_names[_string(message, 8)] += 1
            if 13 in message or _integer(message, 14):
                self.tensors.append(_external_tensor(message))


def _external_tensor(message: _Message) -> OnnxTensor:
    """The tensor of a message whose bytes are in another file."""
    entries = [(_string(entry, 1), _string(entry, 2)) for entry in message.get(13, [])]
    keys = sorted(key for key, _ in entries)
    if _integer(message, 14) != 1 or keys != ["length", "location", "offset"]:
        shown_keys = ", ".join(keys)[:100] or "none"
        raise ValueError(
            f"a tensor in another file: expected the entries length, location and offset, found {shown_keys}"
        )
    values = dict(entries)
    for key in ("offset", "length"):
        if not (values[key].isascii() and values[key].isdecimal() and len(values[key]) <= 18):
            raise ValueError(f"a tensor in another file: expected a decimal {key}, found {values[key][:40]!r}")
    return OnnxTensor(
        name=_string(message, 8),
        element_type=_integer(message, 2),
        shape=_external_shape(message),
        location=values["location"],
        offset=int(values["offset"]),
        length=int(values["length"]),
    )


def _external_shape(message: _Message) -> tuple[int, ...]:
    """The sizes of a tensor in another file. One that claims very many of them is not read further than their limit."""
    shape = tuple(itertools.islice(_integers(message, 1), limits.RANK + 1))
    if len(shape) > limits.RANK:
        raise ValueError(f"a tensor in another file: expected at most {limits.RANK} dimensions, found more")
    # A negative size is an integer of 2^63 and more here.
    if math.prod(size or 1 for size in shape) > limits.TENSOR_ELEMENTS:
        raise ValueError(
            "a tensor in another file: expected sizes of at least 0, and at most "
            f"{limits.TENSOR_ELEMENTS} as the product of those above 0"
        )
    return shape


def _onnx_value(message: _Message) -> OnnxValue:
    [value_type] = message[2]
    if 1 not in value_type:
        raise ValueError(f"expected the value {_string(message, 1)[:80]!r} to be a tensor")
    [tensor_type] = value_type[1]
    [shape] = tensor_type.get(2, [{}])
    return OnnxValue(_string(message, 1), _integer(tensor_type, 1), tuple(map(_dimension, shape.get(1, []))))


def _dimension(message: _Message) -> int | str:
    if 1 in message and 2 in message:
        raise ValueError("a dimension is both an integer and a text")
    return _string(message, 2) if 2 in message else _integer(message, 1)


def _string(message: _Message, field_number: int) -> str:
    [content] = message.get(field_number, [b""])
    return str(content, "utf-8")


def _integer(message: _Message, field_number: int) -> int:
    [content] = message.get(field_number, [0])
    return int(content)


def _integers(message: _Message, field_number: int) -> Iterator[int]:
    """Yield the integers of a repeated field, packed or not."""
    for content in message.get(field_number, []):
        if isinstance(content, int):
            yield content % 2**64
            continue
        position = 0
        while position < len(content):
            number, position = read_varint(content, position)
            yield number % 2**64


def _unconditional_operators(graph: _Message) -> Iterator[str]:
    """Yield the names of the operators of a graph, with those in loops and without those in branches."""
    for node in graph.get(1, []):
        operator_name = _string(node, 4)
        yield operator_name
        if operator_name != "If":
            for attribute in node.get(5, []):
                for nested_graph in (*attribute.get(6, []), *attribute.get(11, [])):
                    yield from _unconditional_operators(nested_graph)


def _nested_messages(message_type: str, message: _Message) -> Iterator[tuple[str, _Message]]:
    """Yield the type and the content of all messages inside a message, at any depth."""
    for field_number, contents in message.items():
        nested_type = _MESSAGE_FIELDS[message_type][field_number].rstrip("*")
        if nested_type in _MESSAGE_FIELDS:
            for nested in contents:
                yield nested_type, nested
                yield from _nested_messages(nested_type, nested)


class _TooLargeError(Exception):
    """A file is over a limit: the number of the rule, and a message."""


class _Parser:
    """Parses the messages of one file and counts their fields."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.field_count = 0

    def parse(self, position: int, end: int, message_type: str, depth: int) -> _Message:
        """Parse the message in the bytes from `position` up to `end`, `end` excluded."""
        if depth > limits.ONNX_DEPTH:
            raise _TooLargeError("L2", "nested too deep")
        content = self.content
        message: _Message = {}
        kinds = _MESSAGE_FIELDS[message_type]
        field_content: Any
        while position < end:
            self.field_count += 1
            if self.field_count > limits.ONNX_FIELDS:
                raise _TooLargeError("L1", f"expected at most {limits.ONNX_FIELDS} fields")
            key, position = read_varint(content, position)
            field_number, wire_type = key >> 3, key & 7
            kind = kinds.get(field_number, "")
            nested_type = kind.rstrip("*")
            if wire_type not in (_WIRE_TYPES.get(kind) or (2,)) or not kind:
                raise ValueError(f"unknown field {field_number} with wire type {wire_type} in a {message_type}")
            if wire_type == 0:
                field_content, position = read_varint(content, position)
                if kind == "small_number" and field_content >= 2**31:
                    raise ValueError(
                        f"field {field_number} of a {message_type}: expected an integer of 0 to 2^31 - 1, found more"
                    )
            else:
                length, position = (
                    read_varint(content, position) if wire_type == 2 else (8 if wire_type == 1 else 4, position)
                )
                if length > end - position:
                    raise ValueError(f"a {message_type} is cut short")
                start, position = position, position + length
                nested = nested_type in _MESSAGE_FIELDS
                field_content = (
                    self.parse(start, position, nested_type, depth + 1) if nested else content[start:position]
                )
            if field_number in message and kind[-1] != "*":
                raise ValueError(f"duplicate field {field_number} in a {message_type}")
            message.setdefault(field_number, []).append(field_content)
        if position != end:
            raise ValueError(f"a {message_type} is cut short")
        return message
