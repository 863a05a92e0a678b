"""What a reader of bundles must know of an ONNX file before a runtime may have it (SPEC O1 to O5).

It is read here field by field, without a library: a host that only checks bundles has none, and one that reads all of a message,
and refuses what it does not know, leaves nothing for another parser to find.
The numbers of the fields are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), the encoding that of
Protocol Buffers (https://protobuf.dev/programming-guides/encoding).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits

# How the names begin of what an ONNX file takes and gives beside the edges: the content of the weights that the stage writes, their
# next content, and what it writes into its inputs.
STATE_PREFIX, NEXT_STATE_PREFIX, WRITTEN_PREFIX = "state.", "next.", "written."

# The element types of ONNX by their torch name.
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
# What stands for a type that ONNX has not: numbers of the host, and pairs of the real and the imaginary part.
SCALAR_TENSOR_DTYPES: Final = MappingProxyType({"symint": "int64", "symfloat": "float64", "symbool": "bool"})
COMPLEX_PART_DTYPES: Final = MappingProxyType({"complex64": "float32", "complex128": "float64"})

# The wire types of plain fields: numbers, texts and bytes (and messages that no rule is on), floats; lists of numbers may be packed.
_WIRES: Final[Mapping[str, frozenset[int]]] = {
    "number": frozenset({0}),
    "bytes": frozenset({2}),
    "float": frozenset({5}),
    "number*": frozenset({0, 2}),
    "bytes*": frozenset({2}),
    "float*": frozenset({5, 2}),
    "double*": frozenset({1, 2}),
}


def _plain(fields: Mapping[str, list[int]]) -> dict[int, str]:
    """Plain fields by their kind."""
    return {number: kind for kind, numbers in fields.items() for number in numbers}


# The messages, and what each of their fields holds: a message, or one of the kinds above; any number of them (*).
_MESSAGES: Final[Mapping[str, Mapping[int, str]]] = {
    "Model": _plain({"number": [1, 5], "bytes": [2, 3, 4, 6], "bytes*": [8, 14, 26]}) | {7: "Graph"},
    "Graph": _plain({"bytes": [2, 10], "bytes*": [13, 16]}) | {1: "Node*", 5: "Tensor*", 11: "Value*", 12: "Value*"},
    "Node": _plain({"bytes": [3, 4, 6, 7], "bytes*": [1, 2, 9, 10]}) | {5: "Attribute*"},
    "Attribute": _plain(
        {"bytes": [1, 4, 13], "bytes*": [9], "float": [2], "number": [3, 20], "float*": [7], "number*": [8]}
    )
    | {5: "Tensor", 6: "Graph", 10: "Tensor*", 11: "Graph*"},
    "Tensor": _plain(
        {
            "number": [2, 14],
            "number*": [1, 5, 7, 11],
            "bytes": [8, 9, 12],
            "bytes*": [6, 16],
            "float*": [4],
            "double*": [10],
        }
    )
    | {13: "Entry*"},
    "Value": _plain({"bytes": [1, 3], "bytes*": [4]}) | {2: "Type"},
    "Type": _plain({"bytes": [6]}) | {1: "TensorType"},
    "TensorType": _plain({"number": [1]}) | {2: "Shape"},
    "Shape": {1: "Dimension*"},
    "Dimension": _plain({"number": [1], "bytes": [2, 3]}),
    "Entry": _plain({"bytes": [1, 2]}),
}
# A message, parsed: what stands in each field, in order. A message inside is one too.
_Fields = dict[int, list[Any]]


@dataclass(frozen=True, slots=True)
class OnnxValue:
    """An input or output: its name, the number of its element type, and its dimensions: numbers, or texts."""

    name: str
    element_type: int
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A tensor whose bytes lie in a file: `length` of them from `offset`."""

    name: str
    location: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """What there is to check in an ONNX file.

    Attributes:
        operators: the domain and the name of each operator that a node calls.
        tensors: the tensors that lie in other files.
    """

    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    operators: frozenset[tuple[str, str]]
    tensors: tuple[OnnxTensor, ...]


def onnx_element_type(dtype: str) -> int | None:
    """The element type of ONNX that a dtype of this format has; None if there is none."""
    return ELEMENT_TYPES.get(SCALAR_TENSOR_DTYPES.get(dtype, COMPLEX_PART_DTYPES.get(dtype, dtype)))


def parse_onnx_model(content: bytes, where: str) -> OnnxModel:
    """Read an ONNX file.

    Raises:
        FormatError: it is not one, or holds what this format leaves out (O2).
        LimitError: too many fields (L1), or nested too deep (L2).
    """
    try:
        model = _Parser(content).message(0, len(content), "Model", 0)
        [graph] = model[7]
        found = _Found()
        for kind, inner in _inside("Model", model):
            found.add(kind, inner)
        return OnnxModel(
            inputs=tuple(map(_value, graph.get(11, []))),
            outputs=tuple(map(_value, graph.get(12, []))),
            operators=frozenset(found.operators),
            tensors=tuple(found.tensors),
        )
    except _TooLargeError as error:
        rule, message = error.args
        raise LimitError([Problem(rule=rule, where=where, message=message)]) from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        message = f"not an ONNX model as this format has it: {str(error)[:200]}"
        raise FormatError([Problem(rule="O2", where=where, message=message)]) from None


@dataclass(slots=True)
class _Found:
    """What was found in all messages so far."""

    operators: set[tuple[str, str]] = field(default_factory=set)
    tensors: list[OnnxTensor] = field(default_factory=list)

    def add(self, kind: str, message: _Fields) -> None:
        if kind == "Node":
            self.operators.add((_text(message, 7), _text(message, 4)))
        elif kind == "Tensor" and (13 in message or _number(message, 14)):
            self.tensors.append(_external(message))


def _external(message: _Fields) -> OnnxTensor:
    """A tensor whose bytes lie in another file."""
    entries = [(_text(entry, 1), _text(entry, 2)) for entry in message.get(13, [])]
    keys = [key for key, _ in entries]
    if _number(message, 14) != 1 or sorted(keys) != ["length", "location", "offset"]:
        raise ValueError(f"a tensor in another file has {', '.join(sorted(keys))[:100] or 'no keys'}")
    values = dict(entries)
    for key in ("offset", "length"):
        if not (values[key].isascii() and values[key].isdecimal() and len(values[key]) <= 18):
            raise ValueError(f"a tensor in another file has the {key} {values[key][:40]!r}")
    return OnnxTensor(_text(message, 8), values["location"], int(values["offset"]), int(values["length"]))


def _value(message: _Fields) -> OnnxValue:
    [kind] = message[2]
    if 1 not in kind:
        raise ValueError(f"the value {_text(message, 1)[:80]!r} is not a tensor")
    [tensor] = kind[1]
    [shape] = tensor.get(2, [{}])
    return OnnxValue(_text(message, 1), _number(tensor, 1), tuple(map(_dim, shape.get(1, []))))


def _dim(message: _Fields) -> int | str:
    if 1 in message and 2 in message:
        raise ValueError("a dimension is a number and a text")
    return _text(message, 2) if 2 in message else _number(message, 1)


def _text(message: _Fields, number: int) -> str:
    [text] = message.get(number, [b""])
    return str(text, "utf-8")


def _number(message: _Fields, number: int) -> int:
    [found] = message.get(number, [0])
    return int(found)


def _inside(kind: str, message: _Fields) -> Iterator[tuple[str, _Fields]]:
    """All messages inside of one, and what each is."""
    for number, held in message.items():
        inner = _MESSAGES[kind][number].rstrip("*")
        if inner in _MESSAGES:
            for part in held:
                yield inner, part
                yield from _inside(inner, part)


class _TooLargeError(Exception):
    """A file is over a limit: the rule, and a message."""


class _Parser:
    """Parses a file, and counts its fields."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fields = 0

    def message(self, position: int, end: int, kind: str, depth: int) -> _Fields:
        """Parse the message between two positions.

        Raises:
            ValueError, IndexError: it is cut short, has a field that is not known, or a second message where one belongs.
            _TooLargeError: it has too many fields, or messages inside one another.
        """
        if depth > limits.ONNX_DEPTH:
            raise _TooLargeError("L2", "nested too deep")
        data = self.data
        fields: _Fields = {}
        known = _MESSAGES[kind]
        part: Any
        while position < end:
            self.fields += 1
            if self.fields > limits.ONNX_FIELDS:
                raise _TooLargeError("L1", f"over the limit of {limits.ONNX_FIELDS} fields")
            key, position = _varint(data, position)
            number, wire = key >> 3, key & 7
            held = known.get(number, "")
            inner = held.rstrip("*")
            if wire not in (_WIRES.get(held) or (2,)) or not held:
                raise ValueError(f"the field {number} of a {kind}, of the wire type {wire}, is not known here")
            if wire == 0:
                part, position = _varint(data, position)
            else:
                length, position = _varint(data, position) if wire == 2 else (8 if wire == 1 else 4, position)
                if length > end - position:
                    raise ValueError(f"a {kind} is cut short")
                start, position = position, position + length
                part = self.message(start, position, inner, depth + 1) if inner in _MESSAGES else data[start:position]
            if number in fields and held[-1] != "*":
                raise ValueError(f"the field {number} of a {kind} stands twice")
            fields.setdefault(number, []).append(part)
        if position != end:
            raise ValueError(f"a {kind} is cut short")
        return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and the position after it."""
    result = data[position]
    if result < 0x80:
        return result, position + 1
    result &= 0x7F
    for shift in range(7, 70, 7):
        position += 1
        octet = data[position]
        result |= (octet & 0x7F) << shift
        if octet < 0x80:
            return result, position + 1
    raise ValueError("a number is too long")
