"""Messages of Protocol Buffers as lists of fields, whatever their types: the notation of ``schema/vectors/README.md``."""

from typing import Any

from tests.conformance.vectors import FIXED_WIRE_TYPES

_FIXED_KINDS = {wire_type: (kind, int(kind.removeprefix("fixed")) // 8) for kind, wire_type in FIXED_WIRE_TYPES.items()}


def message_fields(content: bytes) -> list[list[Any]]:
    """Return the fields of a message: pairs of a number and a content.

    Bytes that are themselves a message become its fields, although they may be a string that looks like a message.

    Args:
        content: the message.

    Raises:
        ValueError: it is no message.
    """
    fields: list[list[Any]] = []
    position = 0
    while position < len(content):
        key, position = _read_varint(content, position)
        wire_type = key & 7
        if wire_type == 0:
            field_content, position = _read_varint(content, position)
            fields.append([key >> 3, field_content])
            continue
        kind = ""
        if wire_type == 2:
            length, position = _read_varint(content, position)
        elif wire_type in _FIXED_KINDS:
            kind, length = _FIXED_KINDS[wire_type]
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        octets = content[position : position + length]
        position += length
        if position > len(content):
            raise ValueError("cut short")
        fields.append([key >> 3, {kind: octets.hex()} if kind else _text_or_message(octets)])
    return fields


def _text_or_message(octets: bytes) -> Any:
    if octets.isascii() and octets.decode().isprintable():
        return octets.decode()
    try:
        return message_fields(octets)
    except ValueError:
        return {"hex": octets.hex()}


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if position == len(content):
            break
        octet = content[position]
        position += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
    raise ValueError("a number is cut short or too long")
