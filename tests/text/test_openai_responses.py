"""The Responses API as OpenAI's own client meets it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseErrorEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    response_create_params,
)
from pydantic import BaseModel, Field

from stagepack_serving.server.errors import FieldError
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_text.openai.requests import decode_openai_request, use_of_field
from stagepack_text.openai.responses import ResponseAnswer, ResponseEvents, ResponseFields
from stagepack_text.openai.routes import ResponsesRoute
from tests.serve.local_server import LocalServer
from tests.serve.servers import openai_client
from tests.text.generating_model import export_decoder
from tests.text.test_openai import field_rows
from tests.text.test_openai_errors import refused_fields
from tests.text.test_openai_tools import TOOLS as CHAT_TOOLS
from tests.text.test_openai_tools import calling_server, space_bias


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("responses")
    # Without a preference for no whitespace, random weights write little else, and requests have no biases.
    writer = export_decoder(folder, {int(token): bias for token, bias in space_bias().items()})
    with calling_server(writer, folder) as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "ending", "input": "Hi", "temperature": 0, **fields})


# The tools of chats, in the form that responses have: the fields of the function beside the type.
TOOLS: Any = [
    {"type": "function", "name": function["name"], "strict": True, "parameters": function["parameters"]}
    for function in (tool["function"] for tool in CHAT_TOOLS)
]
ORDER = ["response.created", "response.in_progress", "response.output_item.added"]


def chat_text(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    request = {"model": "ending", "messages": messages, "temperature": 0, "max_tokens": 9, **fields}
    return client.chat.completions.create(**request).choices[0].message.content


def test_a_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    answer = respond(client, max_output_tokens=9, metadata={"a": "b"}, user="me", store=False)
    assert isinstance(answer, Response)
    assert answer.output_text == chat_text(client, [{"role": "user", "content": "Hi"}])
    assert answer.incomplete_details is not None
    assert answer.usage is not None
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (9, answer.usage.input_tokens + 9)
    assert (answer.object, answer.model, answer.metadata, answer.tool_choice) == (
        "response",
        "ending",
        {"a": "b"},
        "auto",
    )
    [item] = answer.output
    assert isinstance(item, ResponseOutputMessage)
    Response.model_validate(answer.model_dump())  # of the types that it has


def test_a_stream_has_the_events_of_openai(client: openai.OpenAI) -> None:
    whole = respond(client, max_output_tokens=9)
    events = list(respond(client, max_output_tokens=9, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    ends = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert names == [*ORDER, "response.content_part.added", *ends]
    for event in events:
        type(event).model_validate(event.model_dump())
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert deltas == events[-4].text == last.output_text == whole.output_text
    assert (last.usage, last.status) == (whole.usage, whole.status)
    with client.responses.stream(model="ending", input="Hi", temperature=0, max_output_tokens=9) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == deltas
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            stream.get_final_response()


def test_a_conversation_is_an_input(client: openai.OpenAI) -> None:
    part = {"type": "output_text", "text": "b", "annotations": []}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "123456789",
            "name": "f",
            "arguments": '{"a": 3}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "123456789", "output": "x"},
    ]
    answer = respond(client, model="hermes", instructions="s", input=items, max_output_tokens=1)
    assert answer.usage.input_tokens == len("<s>s<u>a<a>b4<t>x") - 2  # <s> is a token
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
    messages: Any = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "x"},
    ]
    assert answer.output_text == chat_text(client, messages, model="hermes", max_tokens=1)


@pytest.mark.parametrize("model", ["hermes", "special", "mistral", "llama3"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "g"}])
def test_tools_are_called_whole_and_in_a_stream(client: openai.OpenAI, model: str, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    request: Any = {"model": model, "tools": TOOLS, "tool_choice": choice}
    whole = respond(client, **request)
    [call] = whole.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (whole.status, call.status, whole.tools[0].name) == ("completed", "completed", "f")
    low = {"f": 10, "g": 20}[call.name]
    assert low <= json.loads(call.arguments)["a"] < low + 10
    assert choice == "required" or call.name == "g"
    events = list(respond(client, **request, stream=True))
    ends = ["response.output_item.done", "response.completed"]
    arguments = [f"response.function_call_arguments.{name}" for name in ("delta", "done")]
    assert [event.type for event in events] == [*ORDER, *arguments, *ends]
    [streamed] = events[-1].response.output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert {event.item_id for event in events[3:5]} == {streamed.id}
    with client.responses.stream(**{"input": "Hi", "temperature": 0, **request}) as stream:
        final = stream.get_final_response()
    [streamed_call] = final.output
    assert isinstance(streamed_call, ResponseFunctionToolCall)
    assert streamed_call.arguments == call.arguments
    # The client sends what it got back, with the result of the tool.
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    again = respond(client, model=model, input=[*whole.output, output], tools=TOOLS, max_output_tokens=2)
    assert again.usage.output_tokens == 2


class State(BaseModel):
    """What an answer is read as."""

    a: int = Field(ge=0, le=9)


def test_an_answer_is_json_of_a_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    parsed = client.responses.parse(model="ending", input="Hi", temperature=0, text_format=State, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, State)


def test_events_of_texts_beside_calls() -> None:
    """Whitespace before a call begins no message; two calls and a text are three items."""
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for texts, item_types in (
        (["\n", ""], ["function_call"] * 2),
        (["a", " b\n"], ["message", "function_call", "function_call"]),
    ):
        sent = events_of(
            [{"content": text} for text in texts] + [{"tool_calls": [function | {"id": "1"}, function | {"id": "2"}]}]
        )
        assert [item["type"] for item in sent[-1]["response"]["output"]] == item_types
        indexes = [event["output_index"] for event in sent if event["type"] == "response.output_item.added"]
        assert indexes == list(range(len(item_types)))
        assert sent[-1]["response"]["output"] == [
            event["item"] for event in sent if event["type"] == "response.output_item.done"
        ]
        texts_sent = "".join(event["delta"] for event in sent if event["type"] == "response.output_text.delta")
        assert texts_sent == ("" if len(item_types) == 2 else "".join(texts))
    [message] = events_of([{"content": ""}])[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


def events_of(deltas: list[dict[str, Any]]) -> list[Any]:
    class Channel:
        events: list[Any] = []  # noqa: RUF012 - of one channel

        async def send_event(self, event: Any) -> None:
            self.events.append(event)

        async def end_events(self) -> None:
            pass

    channel = Channel()
    channel.events = []
    fields = decode_openai_request(bytearray(b'{"model": "m", "input": "a"}'), ResponseFields)
    events = ResponseEvents(ResponseAnswer(fields), channel)

    async def run() -> None:
        for delta in deltas:
            await events.send_event({"choices": [{"delta": delta, "finish_reason": None}], "usage": None})
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1)
        await events.send_event({"choices": [], "usage": usage})
        await events.send_event("[DONE]")
        await events.end_events()

    asyncio.run(run())
    return channel.events


@pytest.mark.parametrize(
    ("fields", "says", "wrong_name"),
    [
        ({"previous_response_id": "resp_1"}, "this server keeps no answers", "previous_response_id"),
        ({"store": True}, "this server keeps no answers", "store"),
        ({"background": True}, "this server does not support it", "background"),
        ({"conversation": "conv_1"}, "this server does not support it", "conversation"),
        ({"tools": [{"type": "web_search"}]}, "web_search", "tools"),
        ({"model": "ending", "tools": TOOLS}, "tools: the bundle of ending cannot call them", "tools"),
        ({"tool_choice": "required"}, "expected `tools` beside it", "tool_choice"),
        ({"input": []}, "input: Expected `array` of length >= 1", "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image", "input"),
        ({"input": [{"role": "user"}]}, "expected `content` in an item of the type message", "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "expected `call_id`", "input"),
        ({"input": "a" * 99}, "context length", "input"),
        ({"max_output_tokens": 10**6}, "context length", "input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "expected a `schema`", "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "Invalid type", "text"),
        ({"reasoning": {"summary": "auto"}}, "summary", "reasoning"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs"),
        ({"extra_body": {"n": 2}}, "unknown field `n`", "n"),
        ({"model": "reader"}, "unknown model", "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused(
    client: openai.OpenAI, fields: Any, says: str, wrong_name: str, stream: bool
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        respond(client, stream=stream, **fields)
    assert raised.value.status_code in (400, 404)
    assert says in raised.value.message
    assert raised.value.param == wrong_name


def test_an_error_after_the_first_event_is_an_event() -> None:
    route = ResponsesRoute(ModelRegistry.__new__(ModelRegistry), ResponseFields)
    error = FieldError("input", "wrong")
    event = ResponseErrorEvent.model_validate(route._error_event("/v1/responses", error, 4))
    assert (event.type, event.sequence_number, event.message) == ("error", 4, "input: wrong")
    assert (event.param, event.code) == ("input", "invalid_request_error")


def test_every_field_that_is_wrong_is_named(server: LocalServer) -> None:
    valid = {"model": "hermes", "input": "a", "max_output_tokens": 1}
    field_names = [*ResponseFields.__struct_fields__, *ResponseFields.neutral_values, "unknown"]
    assert refused_fields(server, "responses", valid, field_names) > 300


def test_the_reference_has_every_field_of_a_request() -> None:
    uses = {name: use for name, kinds, use in field_rows("field of a response request") if kinds}
    assert uses.keys() == {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert uses == {name: use_of_field(ResponseFields, name) for name in uses}
