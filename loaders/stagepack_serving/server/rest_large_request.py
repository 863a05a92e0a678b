"""Large requests: numbers are cut out of their JSON, so that what is left is small, and they are worked on in threads."""

import asyncio
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import numpy
from msgspec import UNSET, Raw, Struct, UnsetType

from stagepack.format.rules import JSON_ERRORS
from stagepack_serving.server.errors import BadRequestError, FieldError, json_refusal

# The bytes of a request without the numbers of its inputs.
_MAX_HEADER_BYTES: Final = 1_000_000
_MAX_OBJECTS: Final = 10_000
_MAX_STRINGS: Final = 100_000
_MAX_FIELDS: Final = 1000
# What JSON lacks, and numbers of the same length.
_NON_FINITE_NUMBERS: Final = ((b"-Infinity", b"-0.000000"), (b"Infinity", b"0.000000"), (b"NaN", b"0e0"))
Outline = TypeVar("Outline")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item")
# Takes less than a millisecond on the event loop, and a thread would cost a tenth of it.
_SMALL_BYTES: Final = 65_536
# More threads would only wait for the interpreter.
_THREADS: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="codec")
# Long enough for a thread that waits for the interpreter to get it.
PAUSE_SECONDS: Final = 5e-5


class _InputOutline(Struct, gc=False):
    """Where the numbers of an input are."""

    data: Raw | UnsetType = UNSET


class _RequestOutline(Struct, gc=False):
    """Where the numbers of the inputs are."""

    inputs: list[_InputOutline]


def split_large_json(json_part: memoryview) -> tuple[bytes, list[bytes | None]]:
    """Cut the numbers of the inputs out of the JSON part of a request.

    The result is the JSON part, in which the numbers of each input are ``[]``, and these numbers; None for an input without them. Both may
    hold NaN, Infinity and -Infinity.
    """
    check_json_counts(json_part, _MAX_OBJECTS, brackets=b"{")
    content = bytes(json_part)
    outline, address = _decode_outline(content, _RequestOutline)
    spans = [None if fields.data is UNSET else _span(fields.data, address) for fields in outline.inputs]
    header_parts, position = [], 0
    for start, end in filter(None, spans):
        header_parts += [content[position:start], b"[]"]
        position = end
    header = b"".join([*header_parts, content[position:]])
    _check_header_bytes(len(header))
    return header, [None if span is None else content[slice(*span)] for span in spans]


def split_fields(body: bytearray) -> dict[str, Raw]:
    """Cut a JSON object into its fields."""
    content = bytes(body)
    fields, address = _decode_outline(content, dict[str, Raw])
    if len(fields) > _MAX_FIELDS:
        raise BadRequestError(f"expected at most {_MAX_FIELDS} fields, found {len(fields)}")
    return {field_name: Raw(content[slice(*_span(value, address))]) for field_name, value in fields.items()}


def decode_fields(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Decode the fields of a request beside its prompt."""
    _check_header_bytes(sum(len(memoryview(value)) for value in fields.values()))
    return {field_name: decode_field(field_name, value, Any) for field_name, value in fields.items()}


def decode_field(field_name: str, value: Raw, field_type: Any) -> Any:
    """Decode a field of a request."""
    try:
        return msgspec.json.decode(value, type=field_type)
    except JSON_ERRORS as error:
        raise FieldError(field_name, str(error)) from None


def check_json_counts(text: bytearray | memoryview, max_containers: int, *, brackets: bytes) -> None:
    """Refuse a JSON text of so many strings, and values in some brackets, that a parser would hold the interpreter for seconds."""
    # By numpy, which does not hold the interpreter: `bytes.count` does, for 0.2 s and more in 60 MB of quotes.
    characters = numpy.frombuffer(text, numpy.uint8)
    container_count = sum(int(numpy.count_nonzero(characters == bracket)) for bracket in brackets)
    quotes = characters == ord('"')
    quotes[1:] &= characters[:-1] != ord("\\")  # quotes in a text are escaped
    string_count = int(numpy.count_nonzero(quotes)) // 2
    if container_count > max_containers or string_count > _MAX_STRINGS:
        raise BadRequestError(
            f"expected at most {max_containers} lists and objects and {_MAX_STRINGS} strings beside the data of tensors, found "
            f"{container_count} and {string_count}"
        )


def _check_header_bytes(byte_count: int) -> None:
    """Refuse a request that is large beside the data of its tensors."""
    if byte_count > _MAX_HEADER_BYTES:
        raise BadRequestError(
            f"expected at most {_MAX_HEADER_BYTES} bytes of JSON beside the data of the inputs, found {byte_count}"
        )


def _decode_outline(content: bytes, outline_type: type[Outline]) -> tuple[Outline, int]:
    """Decode what is not `Raw` in a type. Return it, and the address of the text of which `Raw` is a view.

    That text is as long as the content: NaN and infinities, which msgspec refuses, are numbers in it.
    """
    try:
        try:
            outline = msgspec.json.decode(content, type=outline_type)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            for text, number in _NON_FINITE_NUMBERS:
                content = content.replace(text, number)
            outline = msgspec.json.decode(content, type=outline_type)
    except JSON_ERRORS as error:
        raise json_refusal(content, error) from None
    return outline, _address(content)


def _span(value: Raw, address: int) -> tuple[int, int]:
    """The start and the end of a value in the text at an address, half-open."""
    start = _address(value) - address
    return start, start + len(memoryview(value))


def _address(content: Any) -> int:
    address: int = numpy.frombuffer(content, numpy.uint8).__array_interface__["data"][0]
    return address


async def beside_loop(
    byte_count: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call a function, in a thread if it reads or writes many bytes."""
    if byte_count <= _SMALL_BYTES:
        return function(*args, **kwargs)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(function, *args, **kwargs))


def with_pauses(items: Iterable[Item]) -> Iterator[Item]:
    """Let other threads have the interpreter between steps of work, each of which holds it."""
    for position, item in enumerate(items):
        if position:
            time.sleep(PAUSE_SECONDS)
        yield item
