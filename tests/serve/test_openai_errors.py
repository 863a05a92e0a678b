"""Errors of OpenAI's API: their form, and the field that each names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.generating_model import POSITIONS
from tests.serve.servers import Server, get, post_json, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture(scope="module")
def server(writer: Path) -> Iterator[Server]:
    with stagepack_server([writer]) as server:
        yield server


def ask(server: Server, method: str, path: str) -> tuple[int, Any, Any]:
    status, text, headers = get(server.http, path, method=method)
    return status, json.loads(text)["error"], headers


def test_errors_of_all_paths_have_the_form_of_openai(server: Server) -> None:
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
        ({"model": "reader"}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_that_is_wrong(
    server: Server, fields: Any, wrong_name: str | None, stream: bool
) -> None:
    body = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    status, answer = post_json(server, "/v1/chat/completions", **body | fields)
    assert status in (400, 404)
    assert answer["error"]["param"] == wrong_name, answer
