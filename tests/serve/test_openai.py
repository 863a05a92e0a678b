"""OpenAI's API as its clients meet it."""

import collections
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

from tests.serve.generating_model import POSITIONS, VOCABULARY, export_decoder, tokenizer
from tests.serve.servers import Server, post, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")
PROMPT = "Once upon"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with stagepack_server([export_decoder(tmp_path_factory.mktemp("writer"))], "--max-sequences", "3") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    address = f"http://127.0.0.1:{server.http}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(model="writer", prompt=prompt, **fields)


NULLABLE_FIELDS = (
    "best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix temperature"
    " top_p user top_k min_p repetition_penalty do_sample"
)


def test_null_is_as_if_a_field_was_absent(server: Server) -> None:
    body = {"model": "writer", "prompt": "a"} | dict.fromkeys(NULLABLE_FIELDS.split())
    status, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
    assert (status, answer.get("usage", {}).get("completion_tokens")) == (200, 16), answer
    body = {"model": "writer", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2}
    nulls = [*NULLABLE_FIELDS.split(), "top_logprobs", "tools", "tool_choice", "response_format", "modalities", "store"]
    fields = body | dict.fromkeys(name for name in nulls if name not in ("best_of", "echo", "suffix"))
    fields["stream_options"] = {"include_usage": None}
    status, answer, _ = post(server.http, "/v1/chat/completions", json.dumps(fields))
    assert (status, answer.get("usage", {}).get("completion_tokens")) == (200, 2), answer
    for name in ("prompt", "model"):
        status, answer, _ = post(server.http, "/v1/completions", json.dumps({"model": "a", "prompt": "a", name: None}))
        assert (status, f"missing required field `{name}`" in answer["error"]["message"]) == (400, True), answer


def test_tokens_are_drawn_among_all_unless_the_request_says_otherwise(client: openai.OpenAI) -> None:
    """Temperature 1 and no `top_k` are the defaults of OpenAI; transformers draws among 50."""
    options: Any = {"max_tokens": 1, "temperature": 2.0, "logit_bias": {"9": -100}}
    texts = collections.Counter(complete(client, seed=seed, **options).choices[0].text for seed in range(250))
    assert len(texts) > 50
    first_texts = {complete(client, seed=seed, max_tokens=5).choices[0].text for seed in range(5)}
    assert len(first_texts) > 1
    assert len({complete(client, seed=seed, max_tokens=5, temperature=0).choices[0].text for seed in range(3)}) == 1
    few: Any = {"extra_body": {"top_k": 2}, "max_tokens": 1, "temperature": 100.0}
    assert len({complete(client, seed=seed, **few).choices[0].text for seed in range(30)}) <= 2


def test_a_bias_and_penalties_change_what_is_generated(client: openai.OpenAI) -> None:
    [token] = tokenizer().encode("b").ids
    assert complete(client, max_tokens=4, temperature=0, logit_bias={str(token): 100}).choices[0].text == "bbbb"
    plain = complete(client, max_tokens=40, temperature=0).choices[0].text
    assert complete(client, max_tokens=40, temperature=0, frequency_penalty=2.0).choices[0].text != plain
    for bias, says in (({str(VOCABULARY): 1}, "logit_bias"), ({"a": 1}, "logit_bias"), ({"3": 101}, "logit_bias")):
        with pytest.raises(openai.BadRequestError, match=says):
            complete(client, logit_bias=bias)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "max_tokens": POSITIONS + 1},
        {"prompt": "a" * (POSITIONS + 1)},
        {"prompt": [5] * (POSITIONS + 2), "max_tokens": 1},
        {"prompt": "a" * 128 * (POSITIONS + 1)},
    ],
)
def test_what_does_not_fit_the_context_has_the_code_of_openai(client: openai.OpenAI, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, **fields)
    assert (raised.value.code, raised.value.type) == ("context_length_exceeded", "invalid_request_error")
    message = {"role": "user", "content": fields["prompt"]}
    if isinstance(fields["prompt"], str):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="writer", messages=[message], max_tokens=POSITIONS + 1)  # type: ignore[list-item]
        assert raised.value.code == "context_length_exceeded"


def test_an_answer_without_a_length_takes_what_is_left(client: openai.OpenAI) -> None:
    prompt = "a" * (POSITIONS - 4)
    answer = complete(client, prompt, temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


@pytest.mark.parametrize("prompt", [[-1], [3, -(2**60)], [VOCABULARY]])
def test_tokens_outside_the_vocabulary_are_refused(client: openai.OpenAI, prompt: list[int]) -> None:
    with pytest.raises(openai.BadRequestError, match="expected tokens from 0 to"):
        complete(client, prompt)


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
