"""Messages of Protocol Buffers as lists of fields, whatever their types: the notation of ``schema/vectors/README.md``."""

from typing import Any

FIXED_WIRE_TYPES = {"fixed64": 1, "fixed32": 5}
_FIXED_KINDS = {wire_type: (kind, int(kind.removeprefix("fixed")) // 8) for kind, wire_type in FIXED_WIRE_TYPES.items()}


def message(fields: list[list[Any]]) -> bytes:
    """A message of Protocol Buffers from the numbers of its fields and what stands in each."""
    content = b""
    for number, part in fields:
        if isinstance(part, int):
            content += _varint(number << 3) + _varint(part)
        elif isinstance(part, dict) and "hex" not in part:
            [(kind, octets)] = part.items()
            content += _varint(number << 3 | FIXED_WIRE_TYPES[kind]) + bytes.fromhex(octets)
        else:
            octets = message(part) if isinstance(part, list) else _octets(part)
            content += _varint(number << 3 | 2) + _varint(len(octets)) + octets
    return content


def _varint(number: int) -> bytes:
    """An integer as it is encoded."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def _octets(part: Any) -> bytes:
    return part.encode() if isinstance(part, str) else bytes.fromhex(part["hex"])


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
