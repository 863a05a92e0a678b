"""Errors of OpenAI's API: their form, and the field that each names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack_text.openai.requests import ChatFields, CompletionFields, EmbeddingFields
from tests.sentence_models import HIDDEN, sentence_model, sentence_transformers
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import get, post_json
from tests.text.generating_model import POSITIONS


@pytest.fixture(scope="module")
def server(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("sentences")
    pooling = sentence_transformers().sentence_transformer.modules.Pooling(HIDDEN)
    stagepack.export(sentence_model(folder, pooling), out=folder / "sentences.stagepack")
    with local_server([writer, folder / "sentences.stagepack"]) as server:
        yield server


def ask(server: LocalServer, method: str, path: str) -> tuple[int, Any, Any]:
    status, text, headers = get(server.http, path, method=method)
    return status, json.loads(text)["error"], headers


def test_errors_of_all_paths_have_the_form_of_openai(server: LocalServer) -> None:
    for path in ("/v1", "/v1/", "/v1/fine_tuning/jobs", "/v1/chat"):
        status, error, _ = ask(server, "GET", path)
        assert (status, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    status, error, _ = ask(server, "GET", "/v1/models/reader")
    assert (status, error["code"]) == (404, "model_not_found")
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ):
        status, error, headers = ask(server, method, path)
        assert (status, error["code"]) == (405, "method_not_supported")
        assert sorted(headers["allow"].split(", ")) == allowed.split(", ")


@pytest.mark.parametrize(
    ("fields", "wrong_name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "b" * (POSITIONS + 1)}]}, "messages"),
        ({"stream_options": {"include_usage": 3}}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 0, "do_sample": True}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "response_format"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"audio": {}}, "audio"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"model": None}, "model"),
        ({"max_tokens": POSITIONS}, "messages"),  # as OpenAI has it
        ({"model": "reader"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_that_is_wrong(
    server: LocalServer, fields: Any, wrong_name: str | None, stream: bool
) -> None:
    body = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    status, answer = post_json(server, "/v1/chat/completions", **body | fields)
    assert status in (400, 404)
    assert answer["error"]["param"] == wrong_name, answer


FIELDS_TYPES = {"completions": CompletionFields, "chat/completions": ChatFields, "embeddings": EmbeddingFields}
VALUES: list[Any] = [
    "x",
    "",
    -1,
    0,
    10**9,
    2**70,
    -1e300,
    0.5,
    True,
    [],
    [[]],
    [-1],
    [{}],
    {},
    {"x": 1},
    {"type": "x"},
    [None],
    "\U0010ffff" * 99,
]


def refused_fields(server: LocalServer, path: str, valid: Any, field_names: list[str]) -> int:
    """Check that an error names the field that is wrong, for each value of each field; return the number of errors."""
    refused_count, wrong_names = 0, []
    for field_name in field_names:
        for value in VALUES if field_name != "stream" else VALUES[:5]:
            status, answer = post_json(server, f"/v1/{path}", **valid | {field_name: value})
            assert status in (200, 400, 404), answer
            refused_count += status != 200
            # As OpenAI has it, a prompt that does not fit beside `max_tokens` is what is wrong.
            if (
                status != 200
                and answer["error"]["code"] != "context_length_exceeded"
                and answer["error"]["param"] != field_name
            ):
                wrong_names.append((field_name, value, answer))
    assert not wrong_names
    return refused_count


@pytest.mark.parametrize("path", FIELDS_TYPES)
def test_every_field_that_is_wrong_is_named(server: LocalServer, path: str) -> None:
    valid = {"model": "writer", "max_tokens": 1}
    valid |= {"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("chat") else {"prompt": "a"}
    if path == "embeddings":
        valid = {"model": "sentences", "input": "a"}
    field_names = [*FIELDS_TYPES[path].__struct_fields__, "audio", "functions", "suffix", "unknown"]
    assert refused_fields(server, path, valid, field_names) > 50
