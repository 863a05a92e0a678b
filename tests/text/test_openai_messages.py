"""Conversations, formats and tools whose parts are null, of a wrong type, or refer to nothing: each is refused by name."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from stagepack_serving.server.errors import RequestError
from stagepack_text.openai.requests import ChatFields, decode_openai_request
from stagepack_text.openai.responses import ResponseFields, errors_of_response

TOOL = {"name": "f", "description": "a", "parameters": {"type": "object"}, "strict": True}
SCHEMA = {"name": "a", "description": "b", "schema": {"type": "object"}, "strict": True}
CHAT: Any = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}  # fmt: skip
RESPONSE: Any = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
    ],
    "tools": [{"type": "function", **TOOL}],
}
BODIES = {
    "messages": (ChatFields, CHAT),
    "input": (ResponseFields, RESPONSE),
    "response_format": (
        ChatFields,
        {
            "model": "m",
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        },
    ),
    "text": (ResponseFields, {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", **SCHEMA}}}),
}
# The fields for which null is the same as no field.
OPTIONAL = {"description", "parameters", "strict", "tool_calls", "tool_call_id", "id"}
OPTIONAL_NAMES = (("messages", 0, "name"), ("response_format", "json_schema", "name"), ("text", "format", "name"))


def read(fields_type: Any, body: Any) -> None:
    """Read a request as the routes do, without a model."""
    fields = decode_openai_request(bytearray(json.dumps(body).encode()), fields_type)
    if fields_type is not ResponseFields:
        read_chat(fields)
        return
    with errors_of_response():
        read_chat(fields.chat_fields())


def read_chat(fields: ChatFields) -> None:
    fields.schema()
    fields.template_messages()
    fields.callable_tools()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value but what is in schemas."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        if key not in ("schema", "parameters"):
            yield from places(item, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    place = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return body


def wrong_values(path: tuple[Any, ...]) -> list[Any]:
    """Values that no field of these bodies has at a path, and null where it says something."""
    may_be_null = len(path) == 1 or path[-1] in OPTIONAL or path in OPTIONAL_NAMES or path[-1] == "format"
    # An object is a schema, and the arguments of a call for templates.
    may_be_object = path[-1] in ("schema", "parameters") or path[-2:] == ("function", "arguments")
    return [3, ["x", 3], *([] if may_be_null else [None]), *([] if may_be_object else [{"x": {}}])]


@pytest.mark.parametrize("name", BODIES)
def test_every_part_of_a_wrong_type_is_refused_by_name(name: str) -> None:
    fields_type, body = BODIES[name]
    read(fields_type, body)
    accepted, misnamed, refused_count = [], [], 0
    for path in places(body):
        for value in wrong_values(path):
            try:
                read(fields_type, changed(body, path, value))
                accepted.append((path, value))
            except RequestError as error:
                refused_count += 1
                misnamed += [] if error.field_name == path[0] else [(path, value, str(error))]
    assert not misnamed
    assert not accepted
    assert refused_count >= {"messages": 108, "input": 93, "response_format": 41, "text": 28}[name]


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("messages", ("messages", 2, "tool_call_id"), "2", "the id of an earlier call of a tool, found '2'"),
        ("messages", ("messages", 1, "tool_calls"), [], "the id of an earlier call of a tool, found '1'"),
        ("messages", ("messages", 0), {"role": "tool", "tool_call_id": "1", "content": "b"}, "an earlier call"),
        ("input", ("input", 2, "call_id"), "2", "the id of an earlier call of a tool, found '2'"),
        ("input", ("input", 0), {"type": "function_call_output", "call_id": "1", "output": ""}, "an earlier call"),
        ("input", ("input", 1, "name"), "", "of length >= 1"),
        ("text", ("text", "format", "type"), "text", "only with it, found the format text"),
        ("text", ("text", "format", "type"), "json_object", "only with it, found the format json_object"),
        ("response_format", ("response_format", "type"), "text", "only with it"),
    ],
)
def test_a_part_that_refers_to_nothing_or_is_not_used_is_refused(
    name: str, path: tuple[Any, ...], value: Any, says: str
) -> None:
    fields_type, body = BODIES[name]
    with pytest.raises(RequestError) as raised:
        read(fields_type, changed(body, path, value))
    assert says in str(raised.value)
    assert raised.value.field_name == path[0]


def test_results_without_an_id_and_calls_without_a_result_are_read() -> None:
    """Templates of models whose calls have no ids read such conversations; a client may show a part of one."""
    for path, value in (
        (("messages", 2), {"role": "tool", "content": "b"}),
        (("messages", 2), {"role": "user", "content": "b"}),
        (("messages", 1, "tool_calls", 0, "function", "arguments"), {"a": [1]}),
    ):
        read(ChatFields, changed(CHAT, path, value))


@pytest.mark.parametrize(("fields_type", "body"), [BODIES["messages"], BODIES["input"]], ids=["chat", "response"])
def test_an_unknown_option_of_a_stream_is_refused(fields_type: Any, body: Any) -> None:
    with pytest.raises(RequestError, match="unknown field `include_usge`") as refused:
        read(fields_type, body | {"stream": True, "stream_options": {"include_usge": True}})
    assert refused.value.field_name == "stream_options"
