"""What a server says of itself and of its models."""

from importlib.metadata import version
from typing import Any

from google.protobuf.message import Message


def server_metadata() -> dict[str, Any]:
    """The name and version of the server, and the extensions of the protocol that it knows."""
    return {
        "name": "stagepack",
        "version": version("stagepack"),
        "extensions": ["binary_tensor_data", "model_configuration", "sequence"],
    }


def plain(message: Message) -> dict[str, Any]:
    """The fields of a message that are set, as JSON has them: numbers stay numbers, an enum is its name."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            found[field.name] = [plain(item) for item in value] if field.is_repeated else plain(value)
        elif field.type == field.TYPE_ENUM:
            found[field.name] = field.enum_type.values_by_number[value].name
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found
