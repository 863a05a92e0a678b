"""The JSON part of a large inference request: the numbers of its inputs are cut out, so that what is left is small."""

from typing import Any, Final

import msgspec
import numpy
from msgspec import UNSET, Raw, Struct, UnsetType

from stagepack.format.codec import JSON_ERRORS
from stagepack_serving.server.errors import RequestError, RequestStatus

# Of a request without the numbers of its inputs.
_MAX_HEADER_BYTES: Final = 1_000_000
_MAX_OBJECTS: Final = 10_000
_MAX_STRINGS: Final = 100_000

# What JSON lacks, and numbers of the same length.
_NON_FINITE_NUMBERS: Final = ((b"-Infinity", b"-0.000000"), (b"Infinity", b"0.000000"), (b"NaN", b"0e0"))


class _InputOutline(Struct, gc=False):
    """Where the numbers of an input are."""

    data: Raw | UnsetType = UNSET


class _RequestOutline(Struct, gc=False):
    """Where the numbers of the inputs are."""

    inputs: list[_InputOutline]


def split_large_json(json_part: memoryview) -> tuple[bytes, list[bytes | None]]:
    """Cut the numbers of the inputs out of the JSON part of a request.

    Args:
        json_part: the JSON part.

    Returns:
        The JSON part, in which the numbers of each input are ``[]``, and these numbers; None for an input without them. Both may hold NaN,
        Infinity and -Infinity.

    Raises:
        RequestError: it is not valid JSON, has no inputs, or is large beside their numbers.
    """
    check_json_counts(json_part, _MAX_OBJECTS, _MAX_STRINGS, brackets=b"{")
    content = bytes(json_part)
    spans = _find_numbers(content)
    header_parts, position = [], 0
    for start, end in filter(None, spans):
        header_parts += [content[position:start], b"[]"]
        position = end
    header = b"".join([*header_parts, content[position:]])
    if len(header) > _MAX_HEADER_BYTES:
        message = (
            f"expected at most {_MAX_HEADER_BYTES} bytes of JSON beside the data of the inputs, found {len(header)}"
        )
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    return header, [None if span is None else content[slice(*span)] for span in spans]


def check_json_counts(
    text: bytes | bytearray | memoryview, max_containers: int, max_strings: int, *, brackets: bytes
) -> None:
    """Refuse a JSON text of so many values that a parser would hold the interpreter for seconds.

    Args:
        text: the text.
        max_containers: the largest number of lists or objects.
        max_strings: the largest number of strings.
        brackets: the brackets that are counted.

    Raises:
        RequestError: there are more.
    """
    characters = numpy.frombuffer(text, numpy.uint8)
    container_count = sum(int(numpy.count_nonzero(characters == bracket)) for bracket in brackets)
    string_count = int(numpy.count_nonzero(characters == ord('"'))) // 2
    if container_count > max_containers or string_count > max_strings:
        message = (
            f"expected at most {max_containers} lists and objects and {max_strings} strings beside the data of tensors, found "
            f"{container_count} and {string_count}"
        )
        raise RequestError(RequestStatus.BAD_REQUEST, message)


def _find_numbers(content: bytes) -> list[tuple[int, int] | None]:
    """The start and the end of the numbers of each input, half-open.

    Raises:
        RequestError: it is not valid JSON, or has no inputs.
    """
    try:
        try:
            outline = msgspec.json.decode(content, type=_RequestOutline)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            for text, number in _NON_FINITE_NUMBERS:
                content = content.replace(text, number)
            outline = msgspec.json.decode(content, type=_RequestOutline)
    except JSON_ERRORS as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the request violates the protocol: {error}") from None
    address = _address(content)
    spans: list[tuple[int, int] | None] = []
    for fields in outline.inputs:
        if isinstance(fields.data, UnsetType):
            spans.append(None)
        else:
            # Raw is a view of the content.
            start = _address(fields.data) - address
            spans.append((start, start + len(memoryview(fields.data))))
    return spans


def _address(content: Any) -> int:
    address: int = numpy.frombuffer(content, numpy.uint8).__array_interface__["data"][0]
    return address
