"""The fields of a message of Protocol Buffers, as bytes (https://protobuf.dev/programming-guides/encoding)."""

from collections.abc import Iterable
from typing import Final, NamedTuple

_VARINT: Final = 0
_LENGTH: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}


class Field(NamedTuple):
    """A field: its number, and its content: an integer, or bytes, whose length is written before them unless the wire type fixes it."""

    number: int
    content: bytes | int
    wire_type: int = _LENGTH


def read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Decode the integer at `position`; return it and the position after it."""
    result = content[position]
    if result < 0x80:
        return result, position + 1
    result &= 0x7F
    for shift in range(7, 70, 7):
        position += 1
        octet = content[position]
        result |= (octet & 0x7F) << shift
        if octet < 0x80:
            return result, position + 1
    raise ValueError("an integer has more than 10 bytes")


def split_message(content: bytes) -> list[Field]:
    """Return the fields of a message whose structure was checked, in order."""
    fields, position = [], 0
    while position < len(content):
        key, position = read_varint(content, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = read_varint(content, position)
            fields.append(Field(number, value, wire_type))
            continue
        length = _FIXED_SIZES.get(wire_type, 0)
        if wire_type == _LENGTH:
            length, position = read_varint(content, position)
        fields.append(Field(number, content[position : position + length], wire_type))
        position += length
    return fields


def join_message(fields: Iterable[Field]) -> bytes:
    """Return the message of fields. Law: ``split_message(join_message(fields)) == fields``, with the wire type 0 for integers."""
    content = bytearray()
    for number, value, wire_type in fields:
        if isinstance(value, int):
            content += _varint(number << 3 | _VARINT) + _varint(value)
            continue
        content += _varint(number << 3 | wire_type)
        if wire_type == _LENGTH:
            content += _varint(len(value))
        content += value
    return bytes(content)


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
