"""Client libraries of OpenAI's API call a server as they call OpenAI."""

import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

import stagepack
from tests.serve.servers import Server, stagepack_server
from tests.text.generating_model import export_decoder, tokenizer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import asks the network
langchain: Any = pytest.importorskip("langchain_openai", reason="make test-libraries installs it")
litellm: Any = pytest.importorskip("litellm", reason="make test-libraries installs it")
llama_index: Any = pytest.importorskip("llama_index.llms.openai", reason="make test-libraries installs it")
from langchain_core.messages import HumanMessage  # noqa: E402 - skipped without it
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

# What the libraries say of their own dependencies.
pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.filterwarnings("default")]

TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}<{{ message.role[0] }}>"
    "{{ message.content or '' }}{% endfor %}"
)
# LlamaIndex knows the models of OpenAI alone.
MODEL = "gpt-4o"
# Random weights would write whitespace until the cache is full.
NO_SPACE = {str(tokenizer().token_to_id(name)): -30 for name in ("\u0120", "\u010a", "\u0109")}
SCHEMA = {
    "title": "Answer",
    "description": "An answer",
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "A function", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("caller")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    path = export_decoder(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stagepack.add_assets(path, [folder / "generation_config.json", folder / "chat_template.jinja"], overwrite=True)
    with stagepack_server([f"{MODEL}={path}"]) as server:
        yield server


def options(server: Server, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"http://127.0.0.1:{server.http}/v1", "api_key": "none", **more}


def test_chats_of_langchain(server: Server) -> None:
    chat = langchain.ChatOpenAI(**options(server, seed=1, max_tokens=8, logprobs=True, top_logprobs=2))
    answer = chat.invoke([("system", "Be brief"), ("human", "Hi")])
    assert answer.usage_metadata["output_tokens"] == 8
    assert len(answer.response_metadata["logprobs"]["content"]) == 8
    answers = [answer.content for answer in chat.batch(["Hi", "Ho"])]
    assert answers == [chat.invoke("Hi").content, chat.invoke("Ho").content]
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == answers[0]
    [texts] = chat.generate([[HumanMessage("Hi")]], n=2).generations
    assert [texts[0].text, len(texts)] == [answers[0], 2]
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        chat.invoke("Hi" * 100)


def test_structured_answers_of_langchain(server: Server) -> None:
    chat = langchain.ChatOpenAI(**options(server, seed=1, logit_bias=NO_SPACE))
    structured = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Hi")
    assert structured["a"] in range(10)
    assert chat.with_structured_output(SCHEMA, method="function_calling").invoke("Hi")["a"] in range(10)
    [call] = chat.bind_tools([TOOL], tool_choice="required").invoke("Hi").tool_calls
    assert (call["name"], call["args"]["a"] in range(10)) == ("f", True)
    chunks = list(chat.bind_tools([TOOL], tool_choice="f").stream("Hi"))
    [streamed] = sum(chunks[1:], chunks[0]).tool_calls
    assert (streamed["name"], streamed["args"]) == ("f", call["args"])
    assert not chat.bind_tools([TOOL]).bind(stop=["a"]).invoke("Hi").tool_calls


def test_texts_of_langchain(server: Server) -> None:
    more = {"seed": 1, "max_tokens": 8, "n": 2, "best_of": 2, "presence_penalty": 1, "frequency_penalty": 1}
    model = langchain.OpenAI(**options(server, **more))
    texts = model.generate(["Hi", "Ho"]).generations
    assert [len(prompt_texts) for prompt_texts in texts] == [2, 2]
    assert model.invoke("Hi") == texts[0][0].text
    single = langchain.OpenAI(**options(server, seed=1, max_tokens=8))
    assert "".join(single.stream("Hi")) == single.invoke("Hi")


def test_llama_index(server: Server) -> None:
    api_base = {"api_base": f"http://127.0.0.1:{server.http}/v1"}
    model = llama_index.OpenAI(model=MODEL, api_key="none", max_tokens=8, temperature=0, **api_base)
    text = model.complete("Hi").text
    assert "".join(part.delta for part in model.stream_complete("Hi")) == text
    messages = [ChatMessage(role="user", content="Hi")]
    assert model.chat(messages).message.content == text
    assert "".join(part.delta for part in model.stream_chat(messages)) == text
    calling = llama_index.OpenAI(model=MODEL, api_key="none", additional_kwargs={"logit_bias": NO_SPACE}, **api_base)
    tool = FunctionTool.from_defaults(lambda a: a, name="f", description="d", fn_schema=Arguments)
    answer = calling.chat_with_tools([tool], user_msg="Hi", tool_required=True)
    [call] = calling.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs["a"] in range(10)) == ("f", True)


class Arguments(BaseModel):
    a: int = Field(ge=0, le=9)


def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = options(server, seed=1, messages=[{"role": "user", "content": "Hi"}]) | {"model": f"openai/{MODEL}"}
    whole = litellm.completion(**chat, max_tokens=8, n=2, logprobs=True, top_logprobs=2)
    assert len({choice.message.content for choice in whole.choices}) == 2
    assert len(whole.choices[0].logprobs.content) == 8
    events = list(litellm.completion(**chat, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert (text, events[-1].usage.completion_tokens) == (whole.choices[0].message.content, 8)
    called = litellm.completion(**chat, tools=[TOOL], tool_choice="required", logit_bias=NO_SPACE)
    assert called.choices[0].message.tool_calls[0].function.name == "f"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**chat, max_tokens=800)
    more = {"prompt": ["Hi", "Ho"], "max_tokens": 8, "logprobs": 1, "echo": True}
    echoed = litellm.text_completion(**options(server, **more) | {"model": f"text-completion-openai/{MODEL}"})
    assert [choice.text[:2] for choice in echoed.choices] == ["Hi", "Ho"]
    assert len(echoed.choices[0].logprobs.tokens) == 10
