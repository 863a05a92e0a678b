"""The messages of a chat, as requests of OpenAI's API have them and as chat templates read them."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct

from stagepack_serving.server.errors import FieldError
from stagepack_serving.server.rest_large_request import decode_field

# Assistants may call tools without a text, and templates may know further roles.
_ROLES_WITH_CONTENT: Final = frozenset({"developer", "system", "tool", "user"})
Name = Annotated[str, Meta(min_length=1)]


class _TextPart(Struct):
    """A part of a message."""

    type: Literal["text"]
    text: str


class _CalledFunction(Struct):
    """A function and its arguments, which templates also take as an object."""

    name: Name
    arguments: str | dict[str, Raw] = ""


class _Call(Struct):
    """A call of a tool. Templates without ids take calls without one."""

    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(Struct):
    """The fields of messages that have one meaning in all templates."""

    role: Name
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def read_messages(content: Raw) -> list[dict[str, Any]]:
    """Return the messages, each with its role as a text; `template_process` makes of them what templates expect."""
    messages = decode_field("messages", content, Annotated[list[_Message], Meta(min_length=1)])
    call_ids: set[str | None] = set()
    for index, message in enumerate(messages):
        if message.content is None and message.role in _ROLES_WITH_CONTENT:
            raise FieldError(
                "messages", f"expected `content` in a message of the role {message.role} - at `$[{index}]`"
            )
        if message.tool_call_id is not None:
            check_answered_call("messages", "tool_call_id", message.tool_call_id, call_ids, index)
        call_ids.update(call.id for call in message.tool_calls or ())
    raw_messages = decode_field("messages", content, list[dict[str, Raw]])
    return [raw | {"role": message.role} for message, raw in zip(messages, raw_messages, strict=True)]


def check_answered_call(field_name: str, id_name: str, call_id: str, call_ids: set[Any], index: int) -> None:
    """Refuse the result of a tool that no earlier message has called."""
    if call_id not in call_ids:
        message = f"expected the id of an earlier call of a tool, found {call_id[:80]!r} - at `$[{index}].{id_name}`"
        raise FieldError(field_name, message)
