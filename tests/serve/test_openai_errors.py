"""Errors of OpenAI's API: their form, and the field that each names."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.serve.generating_model import POSITIONS, export_decoder
from tests.serve.servers import Server, post_json, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with stagepack_server([export_decoder(tmp_path_factory.mktemp("writer"))]) as server:
        yield server


def ask(server: Server, method: str, path: str) -> tuple[int, Any, dict[str, str]]:
    """The status, the answer and the headers of a request without a body."""
    connection = HTTPConnection("127.0.0.1", server.http, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def test_errors_of_all_paths_have_the_form_of_openai(server: Server) -> None:
    for path in ("/v1", "/v1/", "/v1/fine_tuning/jobs", "/v1/chat"):
        status, answer, _ = ask(server, "GET", path)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            404,
            "unknown_url",
            "invalid_request_error",
        )
    status, answer, _ = ask(server, "GET", "/v1/models/reader")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ):
        status, answer, headers = ask(server, method, path)
        assert (status, answer["error"]["code"]) == (405, "method_not_supported")
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
