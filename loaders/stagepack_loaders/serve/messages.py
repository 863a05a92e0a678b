"""Requests and answers as the server handles them, whichever way they travel."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from stagepack_loaders.open_inference.datatypes import ELEMENTS
from stagepack_loaders.serve.errors import Reason, RequestError

Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a request or of an answer.

    Attributes:
        datatype: in the words of the protocol.
        array: its elements as `ELEMENTS` says, of the shape that the client sees.
    """

    name: str
    datatype: str
    array: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for an inference.

    Attributes:
        outputs: the names of those that the client asks for; None asks for all.
        parameters: of the request as a whole, such as ``sequence_id``.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def elements(name: str, datatype: str) -> numpy.dtype[Any]:
    """What numpy reads the elements of a tensor as.

    Raises:
        RequestError: there is no such datatype, or bundles have none of it.
    """
    if datatype not in ELEMENTS:
        raise RequestError(
            Reason.BAD_REQUEST, f"{name}: unknown datatype {datatype!r}: expected one of {', '.join(ELEMENTS)}"
        )
    return ELEMENTS[datatype]


def count(name: str, shape: Sequence[int]) -> int:
    """The number of elements of a shape.

    Raises:
        RequestError: a size is negative.
    """
    if any(size < 0 for size in shape):
        raise RequestError(Reason.BAD_REQUEST, f"{name}: expected sizes of 0 and more, found the shape {list(shape)}")
    return math.prod(shape)


def from_bytes(name: str, datatype: str, shape: Sequence[int], content: bytes | memoryview) -> Tensor:
    """A tensor whose elements lie one after another in `content`, which it copies: where they may be written, and at even places.

    Raises:
        RequestError: they are more or fewer than the shape says.
    """
    element = elements(name, datatype)
    expected = count(name, shape) * element.itemsize
    if len(content) != expected:
        found = f"{datatype} {list(shape)} takes {expected} bytes, found {len(content)}"
        raise RequestError(Reason.BAD_REQUEST, f"{name}: {found}")
    if datatype == "BOOL":  # any other byte than 0 and 1 would be neither true nor false
        return Tensor(name=name, datatype=datatype, array=numpy.frombuffer(content, numpy.uint8).reshape(shape) != 0)
    return Tensor(name=name, datatype=datatype, array=numpy.frombuffer(content, element).reshape(shape).copy())


def from_numbers(name: str, datatype: str, shape: Sequence[int], numbers: Any) -> Tensor:
    """A tensor of numbers in lists, flat or nested.

    Raises:
        RequestError: they are of another kind or number, or out of range.
    """
    element = elements(name, datatype)
    if datatype == "BF16":
        raise RequestError(Reason.BAD_REQUEST, f"{name}: BF16 travels as binary data, not as JSON or typed contents")
    expected = count(name, shape)
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[element.kind]
    try:
        kind = numpy.asarray(numbers).dtype.kind if expected else element.kind
        array = numpy.array(numbers, element) if kind in kinds else None
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(
            Reason.BAD_REQUEST, f"{name}: expected numbers of {datatype} in even lists: {error}"
        ) from None
    if array is None:
        raise RequestError(Reason.BAD_REQUEST, f"{name}: expected data of {datatype}, found other values")
    if array.size != expected or (array.ndim > 1 and array.shape != tuple(shape)):
        raise RequestError(
            Reason.BAD_REQUEST,
            f"{name}: expected {expected} elements of the shape {list(shape)}, found {list(array.shape)}",
        )
    return Tensor(name=name, datatype=datatype, array=array.reshape(shape))
