"""Tensors from bytes and from numbers of JSON or of typed gRPC fields, and numbers of JSON from tensors.

JSON is read and written piece by piece: a whole text would hold the interpreter for long, and take 16 times its size in objects.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy

from stagepack_loaders.elements import Array
from stagepack_serving.protocol.datatypes import NUMPY_DTYPES
from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.parameters import InferenceTensor
from stagepack_serving.server.rest_large_request import with_pauses

# One or two milliseconds of work.
_PIECE_BYTES: Final = 131_072
_PIECE_ELEMENTS: Final = 16_384
_BRACKETS_AS_SPACES: Final = bytes.maketrans(b"[]", b"  ")
# All that numbers, true, false, NaN and Infinity consist of, and the spaces around them.
_NUMBER_BYTES: Final = b"0123456789+-.eE \t\r\ntruefalsNaInfinity"
# The limit of numpy.
_MAX_DIMENSIONS: Final = 64
# numpy multiplies the sizes above 0 and the size of an element, also for an array without elements.
_MAX_BYTES: Final = 2**63 - 1


def tensor_from_bytes(
    tensor_name: str, datatype: str, shape: Sequence[int], content: bytes | memoryview
) -> InferenceTensor:
    """Decode a tensor from its elements, little-endian and in row-major order.

    They are copied, so that the array may be written, and is aligned: results may differ by the alignment of the inputs.
    """
    dtype, element_count = _check_datatype_and_shape(tensor_name, datatype, shape)
    expected_bytes = element_count * dtype.itemsize
    if len(content) != expected_bytes:
        message = f"{datatype} {list(shape)} takes {expected_bytes} bytes, found {len(content)}"
        raise BadRequestError(f"{tensor_name}: {message}")
    if datatype == "BOOL":  # A byte other than 0 and 1 would be an invalid bool.
        array = (numpy.frombuffer(content, numpy.uint8) != 0).reshape(shape)
    else:
        array = numpy.frombuffer(content, dtype).reshape(shape).copy()
    return InferenceTensor(name=tensor_name, datatype=datatype, array=array)


def tensor_from_numbers(
    tensor_name: str, datatype: str, shape: Sequence[int], read_array: Callable[[numpy.dtype[Any]], Array]
) -> InferenceTensor:
    """Decode a tensor from numbers, of which `read_array` makes an array of a dtype, flat or of the shape.

    It may raise ValueError and ArithmeticError.
    """
    dtype, element_count = _check_datatype_and_shape(tensor_name, datatype, shape)
    if datatype == "BF16":
        raise BadRequestError(f"{tensor_name}: BF16 is sent as binary data, not as JSON or typed contents")
    try:
        with numpy.errstate(over="raise"):
            array = read_array(dtype)
    except (ArithmeticError, ValueError) as error:
        # A ValidationError of msgspec is a ValueError too.
        message = f"expected data of {datatype}, flat or in lists of the shape {list(shape)}: {error}"
        raise BadRequestError(f"{tensor_name}: {message}") from None
    if array.size != element_count or (array.ndim > 1 and array.shape != tuple(shape)):
        message = f"expected {element_count} elements of the shape {list(shape)}, found {list(array.shape)}"
        raise BadRequestError(f"{tensor_name}: {message}")
    return InferenceTensor(name=tensor_name, datatype=datatype, array=array.reshape(shape))


def _check_datatype_and_shape(tensor_name: str, datatype: str, shape: Sequence[int]) -> tuple[numpy.dtype[Any], int]:
    """The numpy dtype of a tensor and its number of elements."""
    if datatype not in NUMPY_DTYPES:
        expected = ", ".join(NUMPY_DTYPES)
        raise BadRequestError(f"{tensor_name}: unknown datatype {datatype!r}: expected one of {expected}")
    dtype = NUMPY_DTYPES[datatype]
    if (
        len(shape) > _MAX_DIMENSIONS
        or any(size < 0 for size in shape)
        or math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES
    ):
        expected = f"expected up to {_MAX_DIMENSIONS} non-negative sizes and less than 2**63 bytes"
        raise BadRequestError(f"{tensor_name}: {expected}, found the shape {str(list(shape))[:200]}")
    return dtype, math.prod(shape)


def array_from_json(text: bytes, dtype: numpy.dtype[Any], shape: Sequence[int]) -> Array:
    """Decode numbers in a flat list, or in lists nested as the shape is."""
    number_type: Any = {"b": bool, "i": int, "u": int, "f": float}[dtype.kind]
    arrays, separators = [numpy.empty(0, dtype)], []
    for piece in with_pauses(_pieces(text)):
        separators.append(piece.translate(None, delete=_NUMBER_BYTES))
        numbers = piece.strip(b",").translate(_BRACKETS_AS_SPACES)
        if numbers.strip(b", \t\r\n"):  # else it has empty lists alone
            arrays.append(numpy.array(_decode_json_numbers(b"[%b]" % numbers, list[number_type]), dtype))
    array = numpy.concatenate(arrays)
    found_separators = b"".join(separators)
    if found_separators == b"[%b]" % (b"," * (array.size - 1)):
        return array
    sizes = shape[: list(shape).index(0) + 1] if 0 in shape else shape  # an empty list has no lists
    if (
        not shape
        or array.size != math.prod(shape)
        or len(found_separators) != _separator_count(sizes)
        or found_separators != _separators(sizes)
    ):
        raise ValueError("found no list, or lists of other sizes")
    return array.reshape(shape)


def nested_sizes(text: bytes) -> list[int]:
    """Return the size of the first list at each depth of nested lists of numbers, from the outer one to the inner one.

    A list without numbers counts as one with a number. Empty if there are no such lists. `array_from_json` refuses lists of other sizes.
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
    """Yield the parts of the JSON text of the elements of an array, as a flat list.

    NaN and infinities are as Python's json module writes them, since JSON has none, and msgspec writes null.
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


def _decode_json_numbers(text: bytes, numbers_type: Any) -> Any:
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
    """The number of brackets and commas of lists of a shape, of which no size but the last one is 0."""
    count = 0
    for size in reversed(shape):
        count = 2 + max(size - 1, 0) + size * count
    return count
