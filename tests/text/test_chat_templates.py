"""Conversations as texts: by this project as by ``apply_chat_template`` of transformers."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from stagepack_serving.server.errors import BadRequestError
from stagepack_text.openai.requests import ChatFields, decode_openai_request
from stagepack_text.server import template_process
from stagepack_text.server.chat_template import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# In the manner of those that models have, written anew and shortened: each kind of construct that they use is in one.
TEMPLATES = dict(
    section.removesuffix("\n").split("\n", 1)
    for section in (Path(__file__).parent / "chat_templates.txt").read_text().split("==== ")[1:]
)


def call(arguments: Any, call_id: str = "abcdefghi", name: str = "look_up") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": " Grüß <Gott> & 'so' \u2028"}
ASSISTANT = {"role": "assistant", "content": "Yes.\n"}
SYSTEM = {"role": "system", "content": "Be brief"}
PARTS = [
    {"type": "text", "text": " part 1 "},
    {"type": "text", "text": "part 2", "cache_control": {"type": "ephemeral"}},
]
ANSWERED = [{"role": "tool", "tool_call_id": "abcdefghi", "content": "4"}, {"role": "user", "content": "And?"}]


def calling(*calls: Any, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": [*calls], **fields}, *ANSWERED]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "a"}],
    "with system": [SYSTEM, USER],
    "long": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
    "not alternating": [USER, USER],
    "ends with an answer": [USER, ASSISTANT],
    "null fields": [{**USER, "name": None, "tool_calls": None}, {**ASSISTANT, "refusal": None, "audio": None}, USER],
    "no content": [USER, {"role": "assistant"}, USER],
    "call": calling(call('{"a": 1, "b": [1.5, null, "ä"], "n": 123456789012345678901234567890}')),
    "call beside a text": calling(call('{"a": 1}'), content="Let me see"),
    "two calls": calling(call('{"a": 1}'), call('{"b": {}}', "123456789", "other")),
    "empty object": calling(call("{}")),
    "empty arguments": calling(call("")),
    "blank arguments": calling(call(" \n")),
    "no JSON": calling(call('{"a": ')),
    "a list": calling(call("[1, 2]")),
    "a null": calling(call("null")),
    "a text": calling(call('"a"')),
    "object": calling(call({"a": {"b": 1}})),
    "no calls": [USER, {**ASSISTANT, "tool_calls": []}, USER],
    "parts": [{"role": "system", "content": PARTS[:1]}, {"role": "user", "content": PARTS}],
    "parts beside texts": [USER, {"role": "assistant", "content": PARTS}, {"role": "user", "content": PARTS[1:]}],
    "thoughts": [USER, {**ASSISTANT, "reasoning_content": "Hm"}, USER, {**ASSISTANT, "thinking": "Aha"}, USER],
    "thoughts of another name": [USER, {**ASSISTANT, "reasoning": "Hm", "reasoning_content": None}, USER],
}  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "Größe & <b>", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}},
]


class InProcess(ChatTemplate):
    """A template that is filled in here: a process takes 0.2 s to start."""

    def _exchange(self, request: Mapping[str, Any]) -> bytes:
        fields = json.loads(msgspec.json.encode(request))
        try:
            return json.dumps({"text": template_process.render(**fields)}).encode()
        except Exception as error:  # noqa: BLE001 - as the process does
            return json.dumps({"error": str(error)}).encode()


def rendered_here(template: str, messages: Any, tools: Sequence[Any]) -> str | None:
    """The text; None if the template refuses the messages."""
    body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    fields = decode_openai_request(bytearray(json.dumps(body).encode()), ChatFields)
    chat_template = InProcess(template, SPECIAL_TOKENS)
    try:
        return asyncio.run(chat_template.render(fields.template_messages(), fields.tools))
    except BadRequestError:
        return None
    finally:
        chat_template.close()


def rendered_there(template: str, messages: Any, tools: Sequence[Any]) -> str | None:
    # As `apply_chat_template` does it before.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options: Any = {"tools": list(tools) or None, "add_generation_prompt": True, **SPECIAL_TOKENS}
    try:
        return render_jinja_template([messages], chat_template=template, **options)[0][0]
    except Exception:  # noqa: BLE001 - a template raises any error
        return None


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API with the arguments of its calls as transformers documents them, which are objects."""
    if not message.get("tool_calls"):
        return message
    calls = [
        entry | {"function": entry["function"] | {"arguments": decoded(entry["function"]["arguments"])}}
        for entry in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


@pytest.mark.parametrize("template_name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(template_name: str) -> None:
    template, differing = TEMPLATES[template_name], {}
    for conversation, messages in CONVERSATIONS.items():
        for tools in ([], TOOLS):
            found, plain = rendered_here(template, messages, tools), [with_objects(message) for message in messages]
            expected = rendered_there(template, plain, tools)
            if "parts" in conversation:
                expected = with_all_parts(
                    expected, rendered_there(template, [with_texts(message) for message in plain], tools)
                )
            if found != expected:
                differing[conversation, len(tools)] = (found, expected)
    assert not differing


def with_all_parts(text: str | None, joined_text: str | None) -> str | None:
    """What transformers writes of parts, or of one text if that is an error, Python's notation of a list, or not all of them."""
    if text is None or "[{'type': 'text', 'text': " in text.lower():
        return joined_text
    parts = ("part 1", "part 2")
    is_whole = joined_text is None or all(text.lower().count(part) >= joined_text.lower().count(part) for part in parts)
    return text if is_whole else joined_text


def test_there_are_many_templates_of_which_most_write_most_conversations() -> None:
    texts = [rendered_there(template, CONVERSATIONS["long"], TOOLS) for template in TEMPLATES.values()]
    assert len(TEMPLATES) >= 60
    assert sum(text is not None for text in texts) >= 60


def test_conversations_with_tools_may_have_a_template_of_their_own() -> None:
    async def run() -> list[str]:
        with contextlib.closing(ChatTemplate("{{ tools }}", {}, "<tool_call>{{ tools | length }}")) as chat_template:
            assert chat_template.call_form is not None
            return [await chat_template.render([USER], tools) for tools in ([], TOOLS)]

    assert asyncio.run(run()) == ["None", "<tool_call>2"]
