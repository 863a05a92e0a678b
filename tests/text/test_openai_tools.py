"""Answers over OpenAI's API that are JSON of a schema, or calls of tools."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

import stagepack
from stagepack_text.server.text_stream import TextFormat
from stagepack_text.server.tool_calls import CallForm, CallReader, ToolCall, form_of_template
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import openai_client, post
from tests.text.generating_model import decoded_parts, tokenizer

# What makes them those of models that call tools, and messages as short as the cache.
CALLING_TEMPLATES = {
    "hermes": "{# <tool_call> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "llama3": "{# Environment: ipython #}",
    "coder": "{# <tool_call><function= #}",
}
CALLING_MESSAGES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}<{{ message.role[0] }}>"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.a + 1 }}{% endfor %}{% endfor %}"
)


@contextlib.contextmanager
def calling_server(writer: Path, folder: Path) -> Iterator[LocalServer]:
    """A server of `writer`, of the same with a token that ends texts, and of models that call tools."""
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    ending = shutil.copytree(writer, folder / "ending.stagepack")
    stagepack.add_assets(ending, [folder / "generation_config.json"])
    callers = []
    for model, template in CALLING_TEMPLATES.items():
        callers.append(shutil.copytree(ending, folder / f"{model}.stagepack"))
        (folder / "chat_template.jinja").write_text(template + CALLING_MESSAGES)
        stagepack.add_assets(callers[-1], [folder / "chat_template.jinja"], overwrite=True)
    # The markers of calls as special tokens, which a decoded text leaves out.
    callers.append(shutil.copytree(folder / "hermes.stagepack", folder / "special.stagepack"))
    (folder / "tokenizer.json").write_text(special_tokenizer().to_str())
    stagepack.add_assets(callers[-1], [folder / "tokenizer.json"], overwrite=True)
    with local_server([writer, ending, *callers], "--max-sequences", "3") as server:
        yield server


def special_tokenizer() -> Tokenizer:
    special = tokenizer()
    special.add_special_tokens(["<tool_call>", "</tool_call>"])
    return special


@pytest.fixture(scope="module")
def server(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with calling_server(writer, tmp_path_factory.mktemp("ending")) as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}, "mood": {"enum": ["gut", "schlecht"]}},
    "required": ["age", "mood"],
    "additionalProperties": False,
}


def converse(client: openai.OpenAI, **fields: Any) -> Any:
    """A conversation with the model whose texts end."""
    messages = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(**{"model": "ending", "messages": messages, **fields})


@pytest.mark.parametrize("temperature", [0, 1, 5])
def test_an_answer_satisfies_a_json_schema(client: openai.OpenAI, temperature: float) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    response_format = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA, "strict": True}}
    # Without a preference for no whitespace, random weights write little else.
    options = {"temperature": temperature, "logit_bias": space_bias(), "response_format": response_format}
    for choice in converse(client, seed=1, n=4, **options).choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"


def space_bias() -> dict[str, float]:
    return {str(tokenizer().token_to_id(name)): -30 for name in ("\u0120", "\u010a", "\u0109")}


def test_an_answer_is_a_json_object(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    options: Any = {"response_format": {"type": "json_object"}, "temperature": 0, "logit_bias": space_bias()}
    [end] = tokenizer().encode("}").ids
    options["logit_bias"] = options["logit_bias"] | {str(end): 50}
    assert json.loads(converse(client, **options).choices[0].message.content) == {}
    text = "".join(event.choices[0].delta.content for event in converse(client, stream=True, **options))
    assert json.loads(text) == {}


@pytest.mark.parametrize(
    ("response_format", "model", "says"),
    [
        ({"type": "json_schema"}, "ending", "response_format: expected `json_schema` with the type json_schema"),
        ({"type": "xml"}, "ending", "response_format"),
        ({"type": "json_object"}, "writer", "cannot answer with JSON of a schema: the bundle names no token"),
        ({"type": "objekt"}, "ending", "Invalid type: objekt"),
        ({"$ref": "#"}, "ending", "expected a JSON schema that llguidance supports"),
        ({"$ref": "file:///etc/passwd"}, "ending", "expected a JSON schema that llguidance supports"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "ending", "Unsatisfiable schema"),
        ([], "ending", "response_format"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(
    client: openai.OpenAI, response_format: Any, model: str, says: str
) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    formats = ("json_schema", "xml", "json_object")
    if isinstance(response_format, dict) and response_format.get("type") not in formats:
        response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": response_format}}
    with pytest.raises(openai.BadRequestError) as raised:
        converse(client, model=model, response_format=response_format)
    assert says in raised.value.message


class State(BaseModel):
    """What an answer is read as, and the arguments of a tool."""

    a: int = Field(ge=0, le=9)


def test_the_client_reads_answers_and_calls_as_objects(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    messages: Any = [{"role": "user", "content": "Hi"}]
    request: Any = {"model": "hermes", "messages": messages, "logit_bias": space_bias(), "seed": 1}
    parsed = client.chat.completions.parse(**request, response_format=State).choices[0].message.parsed
    assert isinstance(parsed, State)
    tools = [openai.pydantic_function_tool(State, name="f")]
    called = client.chat.completions.parse(**request, tools=tools, tool_choice="required").choices[0].message
    assert called.tool_calls is not None
    assert isinstance(called.tool_calls[0].function.parsed_arguments, State)
    with client.chat.completions.stream(**request, tools=tools, tool_choice="required") as stream:
        [event] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert event.parsed_arguments == called.tool_calls[0].function.parsed_arguments
        assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**request, response_format=State) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


HOSTILE_SCHEMAS = {
    "deep": '{"items":' * 900 + "{}" + "}" * 900,
    "deeper": '{"items":' * 90_000 + "{}" + "}" * 90_000,
    "product": json.dumps(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]} for i in range(10)]}
    ),
    "cycle": '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}',
    "expression": '{"type":"string","pattern":"((a{1,1000}){1,1000}){1,1000}b"}',
    "other grammar": '{"x-guidance":{"whitespace_pattern":"(a*)*"},"$ref":"https://example.com"}',
}


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_schemas_of_strangers_are_bounded(server: LocalServer, name: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = '{"type":"json_schema","json_schema":{"name":"a","schema":' + HOSTILE_SCHEMAS[name] + "}}"
    body = (
        '{"model":"ending","messages":[{"role":"user","content":"a"}],"max_tokens":3,"response_format":' + schema + "}"
    )
    memory, start_time = server.memory(), time.monotonic()
    status, answer, _ = post(server.http, "/v1/chat/completions", body)
    assert status == (200 if name == "expression" else 400), answer
    assert time.monotonic() - start_time < 5
    assert server.memory() < memory + 200_000_000


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look something up",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": low, "maximum": low + 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name, low in (("f", 10), ("g", 20))
]
CHOSEN: Any = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("model", ["hermes", "mistral", "llama3", "special"])
@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, model: str, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    request: Any = {"model": model, "tools": TOOLS, "tool_choice": choice, "seed": 3, "logit_bias": space_bias()}
    whole = converse(client, **request, n=2)
    for answer in whole.choices:
        [call] = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content, call.type) == ("tool_calls", None, "function")
        low = {"f": 10, "g": 20}[call.function.name]
        assert low <= json.loads(call.function.arguments)["a"] < low + 10
        assert choice == "required" or call.function.name == "g"
        assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    deltas = [event.choices[0].delta for event in converse(client, **request, stream=True)]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or ()]
    first, other = whole.choices[0].message.tool_calls[0].function, streamed.function
    assert (streamed.index, other.name, other.arguments) == (0, first.name, first.arguments)
    assert not "".join(delta.content or "" for delta in deltas).strip()


def test_calls_between_special_tokens_are_seen(client: openai.OpenAI) -> None:
    assert HERMES is not None
    text_format = TextFormat(special_tokenizer(), None)
    tokens = text_format.encode("So: " + MARKED + MARKED, adds_special_tokens=False)
    for shown_tokens, says in (
        (frozenset(), ("So: ", [])),
        (text_format.special_ids(HERMES.markers), ("So: ", CALLS[:1] * 2)),
    ):
        parts = decoded_parts(text_format, tokens, stop_strings=["stop"], shown_tokens=shown_tokens)
        whole = "".join(part.text for part in parts)
        content, calls = CallReader(HERMES, frozenset("f")).split(whole)
        assert (content.partition("{")[0], calls) == says
    [token] = special_tokenizer().encode("<tool_call>").ids
    request: Any = {"model": "special", "max_tokens": 2, "logit_bias": {str(token): 100}}
    assert converse(client, **request).choices[0].message.content == ""
    assert converse(client, **request, tools=TOOLS).choices[0].message.content == "<tool_call>" * 2


def test_tools_are_in_the_prompt_and_texts_without_calls_are_texts(client: openai.OpenAI) -> None:
    request: Any = {"model": "hermes", "max_tokens": 5, "temperature": 0}
    plain, offered = converse(client, **request), converse(client, **request, tools=TOOLS)
    assert offered.usage.prompt_tokens == plain.usage.prompt_tokens + len("fg")
    assert (offered.choices[0].message.tool_calls, offered.choices[0].finish_reason) == (None, "length")
    streamed = converse(client, **request, tools=TOOLS, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in streamed)
    assert text == offered.choices[0].message.content
    unused = converse(client, **request, tools=TOOLS, tool_choice="none")
    assert unused.choices == plain.choices
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "x"},
    ]
    answered = converse(client, **request, messages=messages)
    developer, system = (
        converse(client, **request, messages=[{"role": role, "content": "Be brief"}])
        for role in ("developer", "system")
    )
    assert developer.choices == system.choices
    assert answered.usage.prompt_tokens == len("<u>Hi<a>4<t>x")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "ending", "tools": TOOLS}, "tools: the bundle of ending cannot call them: expected a chat template"),
        ({"model": "coder", "tools": TOOLS}, "tools: the bundle of coder cannot call them"),
        ({"model": "hermes", "tools": [{"type": "function", "function": {"name": "a b"}}]}, "matching regex"),
        ({"model": "hermes", "tools": [{"type": "custom"}]}, "type"),
        ({"model": "hermes", "tool_choice": "auto"}, "tool_choice: expected `tools` beside it"),
        (
            {"model": "hermes", "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice: expected the name of one of `tools`, found 'h'",
        ),
        ({"model": "hermes", "tools": TOOLS, "response_format": {"type": "json_object"}}, "expected a text"),
        ({"functions": [{"name": "a"}]}, "functions: this server does not support it"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(client: openai.OpenAI, fields: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        converse(client, **fields)
    assert says in raised.value.message


HERMES, MISTRAL, LLAMA3, _ = (form_of_template(f"{template} tools") for template in CALLING_TEMPLATES.values())
MARKED = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
CALLS = [ToolCall("f", '{"a": 1}'), ToolCall("g", '{"b": "ä", "c": [1, {"name": "f"}]}')]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", CALLS[:1]),
        (
            HERMES,
            f"So: {MARKED}\n<tool_call>\n" + '{"name":"g","arguments":{"b":"ä","c":[1,{"name":"f"}]}}',
            "So: ",
            CALLS,
        ),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        (HERMES, "<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
        (HERMES, "a <b> <tool", "a <b> <tool", []),
        (HERMES, '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1}}', []),
        (MISTRAL, '[{"name": "f", "arguments": {"a": 1}}]', "", CALLS[:1]),
        (MISTRAL, '[{"name": "h", "arguments": {"a": 1}}]', '[{"name": "h", "arguments": {"a": 1}}]', []),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        (MISTRAL, "[" * 100_000, "[" * 100_000, []),
        (MISTRAL, "Hello", "Hello", []),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", CALLS[:1]),
        (
            LLAMA3,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": "ä", "c": [1, {"name": "f"}]}}',
            "",
            CALLS,
        ),
        (LLAMA3, '{"name": "f", "parameters": {"a": NaN}}', '{"name": "f", "parameters": {"a": NaN}}', []),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}} and', '{"name": "f", "parameters": {"a": 1}} and', []),
    ],
)
def test_calls_are_found_in_texts(form: CallForm, text: str, content: str, calls: list[ToolCall]) -> None:
    reader = CallReader(form, frozenset("fg"))
    assert reader.split(text) == (content, calls)
    assert CallReader(form, frozenset("fg"), 1).split(text)[1] == calls[:1]
    for length in range(0, len(text), max(1, len(text) // 100)):
        assert content.startswith(reader.spoken(text[:length]))
