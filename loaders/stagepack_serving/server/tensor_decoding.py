"""Input tensors from bytes, and from numbers of JSON or of typed gRPC fields."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy

from stagepack_loaders.elements import Array
from stagepack_serving.protocol.datatypes import NUMPY_DTYPES
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.parameters import (
    InferenceTensor,
)

# Decodes the numbers of an input as the type that it is called with: `list[float]`, or nested lists.
NumberDecoder = Callable[[Any], Any]
# The limit of numpy.
_MAX_DIMENSIONS: Final = 64
# numpy multiplies the sizes above 0 and the size of an element, also for an array without elements.
_MAX_BYTES: Final = 2**63 - 1


def tensor_from_bytes(
    tensor_name: str, datatype: str, shape: Sequence[int], content: bytes | memoryview
) -> InferenceTensor:
    """Decode a tensor from its elements in row-major order.

    content: the elements, little-endian. They are copied, so that the array may be written, and is aligned: results may differ by the
        alignment of the inputs.
    """
    dtype, element_count = _check_datatype_and_shape(tensor_name, datatype, shape)
    expected_bytes = element_count * dtype.itemsize
    if len(content) != expected_bytes:
        message = f"{datatype} {list(shape)} takes {expected_bytes} bytes, found {len(content)}"
        raise RequestError(RequestStatus.BAD_REQUEST, f"{tensor_name}: {message}")
    if datatype == "BOOL":  # A byte other than 0 and 1 would be an invalid bool.
        array = (numpy.frombuffer(content, numpy.uint8) != 0).reshape(shape)
    else:
        array = numpy.frombuffer(content, dtype).reshape(shape).copy()
    return InferenceTensor(name=tensor_name, datatype=datatype, array=array)


def tensor_from_numbers(
    tensor_name: str, datatype: str, shape: Sequence[int], decode_numbers: NumberDecoder
) -> InferenceTensor:
    """Decode a tensor from numbers in a flat list, or in lists nested as the shape is."""

    def read_array(dtype: numpy.dtype[Any]) -> Array:
        number_type = {"b": bool, "i": int, "u": int, "f": float}[dtype.kind]
        return numpy.array(_decode_flat_or_nested(decode_numbers, number_type, len(shape)), dtype)

    return tensor_from_reader(tensor_name, datatype, shape, read_array)


def tensor_from_reader(
    tensor_name: str, datatype: str, shape: Sequence[int], read_array: Callable[[numpy.dtype[Any]], Array]
) -> InferenceTensor:
    """Decode a tensor from numbers, of which the array is made here.

    read_array: returns the array, flat or of the shape, of the dtype that it is called with. It may raise ValueError and ArithmeticError.
    """
    dtype, element_count = _check_datatype_and_shape(tensor_name, datatype, shape)
    if datatype == "BF16":
        raise RequestError(
            RequestStatus.BAD_REQUEST, f"{tensor_name}: BF16 is sent as binary data, not as JSON or typed contents"
        )
    try:
        with numpy.errstate(over="raise"):
            array = read_array(dtype)
    except (ArithmeticError, ValueError) as error:
        # Of msgspec too: its ValidationError is a ValueError.
        message = f"expected data of {datatype}, flat or in lists of the shape {list(shape)}: {error}"
        raise RequestError(RequestStatus.BAD_REQUEST, f"{tensor_name}: {message}") from None
    if array.size != element_count or (array.ndim > 1 and array.shape != tuple(shape)):
        message = f"expected {element_count} elements of the shape {list(shape)}, found {list(array.shape)}"
        raise RequestError(RequestStatus.BAD_REQUEST, f"{tensor_name}: {message}")
    return InferenceTensor(name=tensor_name, datatype=datatype, array=array.reshape(shape))


def _decode_flat_or_nested(decode_numbers: NumberDecoder, number_type: Any, dimension_count: int) -> Any:
    try:
        return decode_numbers(list[number_type])
    except msgspec.ValidationError:
        if dimension_count < 2:
            raise
    nested_type: Any = number_type
    for _ in range(dimension_count):
        nested_type = list[nested_type]
    return decode_numbers(nested_type)


def _check_datatype_and_shape(tensor_name: str, datatype: str, shape: Sequence[int]) -> tuple[numpy.dtype[Any], int]:
    """The numpy dtype of a tensor and its number of elements."""
    if datatype not in NUMPY_DTYPES:
        expected = ", ".join(NUMPY_DTYPES)
        raise RequestError(
            RequestStatus.BAD_REQUEST, f"{tensor_name}: unknown datatype {datatype!r}: expected one of {expected}"
        )
    dtype = NUMPY_DTYPES[datatype]
    if (
        len(shape) > _MAX_DIMENSIONS
        or any(size < 0 for size in shape)
        or math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES
    ):
        expected = f"expected up to {_MAX_DIMENSIONS} non-negative sizes and less than 2**63 bytes"
        message = f"{tensor_name}: {expected}, found the shape {str(list(shape))[:200]}"
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    return dtype, math.prod(shape)
