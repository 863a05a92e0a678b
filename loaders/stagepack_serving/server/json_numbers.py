"""Tensors from the numbers of a large JSON text, and such texts, piece by piece: a whole would hold the interpreter for long."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy

from stagepack_loaders.elements import Array
from stagepack_serving.server.beside_loop import with_pauses

# One or two milliseconds of work.
_PIECE_BYTES: Final = 131_072
_PIECE_ELEMENTS: Final = 16_384

_BRACKETS_AS_SPACES: Final = bytes.maketrans(b"[]", b"  ")
# All that numbers, true, false, NaN and Infinity consist of, and the spaces around them.
_NUMBER_BYTES: Final = b"0123456789+-.eE \t\r\ntruefalsNaInfinity"


def array_from_json(text: bytes, dtype: numpy.dtype[Any], shape: Sequence[int]) -> Array:
    """Decode numbers in a flat list, or in lists nested as the shape is."""
    number_type: Any = {"b": bool, "i": int, "u": int, "f": float}[dtype.kind]
    arrays, separators = [], []
    for piece in with_pauses(_pieces(text)):
        separators.append(piece.translate(None, delete=_NUMBER_BYTES))
        numbers = b"[%b]" % piece.strip(b",").translate(_BRACKETS_AS_SPACES)
        arrays.append(numpy.array(_decode_numbers(numbers, list[number_type]), dtype))
    array = numpy.concatenate(arrays)
    found_separators = b"".join(separators)
    if found_separators == b"[%b]" % (b"," * (array.size - 1)):
        return array
    if (
        not shape
        or array.size != math.prod(shape)
        or len(found_separators) != _separator_count(shape)
        or found_separators != _separators(shape)
    ):
        raise ValueError("found no list, or lists of other sizes")
    return array.reshape(shape)


def nested_sizes(text: bytes) -> list[int]:
    """Return the shape of numbers in nested lists.

    The result is the size of the first list at each depth, from the outer one to the inner one; a list without numbers counts as one with a
        number. Empty if there are no such lists. `array_from_json` refuses lists that have other sizes.
    """
    separators = text.translate(None, delete=_NUMBER_BYTES)
    depth = len(separators) - len(separators.lstrip(b"["))
    sizes, end, item_length = [], 0, 0
    for level in range(1, depth + 1):
        end = separators.find(b"]" * level, end)
        if end < 0:
            return []
        length = end + 2 * level - depth  # of the first list of this level, in brackets and commas
        sizes.append((length - 1) // (item_length + 1))
        item_length = length
    return sizes[::-1]


def json_from_array(array: Array) -> Iterator[bytes]:
    """Encode the elements of an array as a flat list.

    It yields parts of the JSON text. NaN and infinities are as Python's json module writes them, since JSON has none, and msgspec writes
        null.
    """
    elements = array.reshape(-1)
    is_finite = elements.dtype.kind != "f" or bool(numpy.isfinite(elements).all())
    yield b"["
    for start in with_pauses(range(0, elements.size, _PIECE_ELEMENTS)):
        values = elements[start : start + _PIECE_ELEMENTS].tolist()
        text = msgspec.json.encode(values) if is_finite else json.dumps(values).encode()
        yield text[1:-1] if start == 0 else b"," + text[1:-1]
    yield b"]"


def _pieces(text: bytes) -> Iterator[bytes]:
    """Cut a text at commas, which belong to the piece after them."""
    start = 0
    while start < len(text):
        end = text.find(b",", start + _PIECE_BYTES)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


def _decode_numbers(text: bytes, numbers_type: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=numbers_type)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(text), numbers_type)


def _separators(shape: Sequence[int]) -> bytes:
    """The brackets and commas of lists of a shape."""
    separators = b""
    for size in reversed(shape):
        separators = b"[%b]" % b",".join([separators] * size)
    return separators


def _separator_count(shape: Sequence[int]) -> int:
    """The number of brackets and commas of lists of a shape, of which no size is 0."""
    count = 0
    for size in reversed(shape):
        count = 2 + size - 1 + size * count
    return count
