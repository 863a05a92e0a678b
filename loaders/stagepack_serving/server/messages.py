"""Requests and answers as the server handles them, whichever way they travel."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy

from stagepack_loaders.elements import Array
from stagepack_serving.protocol.datatypes import ELEMENTS
from stagepack_serving.server.errors import Reason, RequestError

_DIMENSIONS: Final = 64  # numpy has no more
_ELEMENTS: Final = 2**63 - 1


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


def flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A parameter that is true or false.

    Raises:
        RequestError: it is neither.
    """
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise RequestError(Reason.BAD_REQUEST, f"the parameter {name}: expected true or false, found {found!r}")
    return found


def check_memory(name: str, parameters: Iterable[str]) -> None:
    """Check that a tensor does not travel in memory that client and server share.

    Raises:
        RequestError: it does.
    """
    if "shared_memory_region" in parameters:
        raise RequestError(Reason.BAD_REQUEST, f"{name}: this server shares no memory: send the data, and ask for it")


def from_bytes(name: str, datatype: str, shape: Sequence[int], content: bytes | memoryview) -> Tensor:
    """A tensor whose elements lie one after another in `content`, which it copies: where they may be written, and at even places.

    Raises:
        RequestError: they are more or fewer than the shape says.
    """
    element, number = _checked(name, datatype, shape)
    if len(content) != number * element.itemsize:
        message = f"{datatype} {list(shape)} takes {number * element.itemsize} bytes, found {len(content)}"
        raise RequestError(Reason.BAD_REQUEST, f"{name}: {message}")
    if datatype == "BOOL":  # any other byte than 0 and 1 would be neither true nor false
        return Tensor(name=name, datatype=datatype, array=numpy.frombuffer(content, numpy.uint8).reshape(shape) != 0)
    return Tensor(name=name, datatype=datatype, array=numpy.frombuffer(content, element).reshape(shape).copy())


def from_numbers(name: str, datatype: str, shape: Sequence[int], numbers: Callable[[Any], Any]) -> Tensor:
    """A tensor of numbers in lists; `numbers` gives them as a type of lists that it is asked for, flat or of all dimensions.

    Raises:
        RequestError: they are of another kind or number, or out of range.
    """
    element, number = _checked(name, datatype, shape)
    if datatype == "BF16":
        raise RequestError(Reason.BAD_REQUEST, f"{name}: BF16 travels as binary data, not as JSON or typed contents")
    kind = {"b": bool, "i": int, "u": int, "f": float}[element.kind]
    try:
        with numpy.errstate(over="raise"):
            array = numpy.array(_flat_or_nested(numbers, kind, len(shape)), element)
    except (ArithmeticError, ValueError) as error:  # of msgspec too: a kind that does not fit
        message = f"expected data of {datatype}, flat or in lists of the shape {list(shape)}: {error}"
        raise RequestError(Reason.BAD_REQUEST, f"{name}: {message}") from None
    if array.size != number or (array.ndim > 1 and array.shape != tuple(shape)):
        message = f"expected {number} elements of the shape {list(shape)}, found {list(array.shape)}"
        raise RequestError(Reason.BAD_REQUEST, f"{name}: {message}")
    return Tensor(name=name, datatype=datatype, array=array.reshape(shape))


def _flat_or_nested(numbers: Callable[[Any], Any], kind: Any, depth: int) -> Any:
    try:
        return numbers(list[kind])
    except msgspec.ValidationError:
        if depth < 2:
            raise
    for _ in range(depth):
        kind = list[kind]
    return numbers(kind)


def _checked(name: str, datatype: str, shape: Sequence[int]) -> tuple[numpy.dtype[Any], int]:
    """What numpy reads the elements of a tensor as, and their number.

    Raises:
        RequestError: there is no such datatype, or bundles have none of it; or no such shape.
    """
    if datatype not in ELEMENTS:
        known = ", ".join(ELEMENTS)
        raise RequestError(Reason.BAD_REQUEST, f"{name}: unknown datatype {datatype!r}: expected one of {known}")
    if len(shape) > _DIMENSIONS or any(size < 0 for size in shape) or math.prod(filter(None, shape)) > _ELEMENTS:
        expected = f"expected up to {_DIMENSIONS} sizes of 0 and more, and less than 2**63 elements"
        message = f"{expected}, found the shape {str(list(shape))[:200]}"
        raise RequestError(Reason.BAD_REQUEST, f"{name}: {message}")
    return ELEMENTS[datatype], math.prod(shape)
