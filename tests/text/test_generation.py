"""Texts over the server: Triton's generate extension, decoupled gRPC, and OpenAI's API, each with its own client."""

# Long because all its tests ask one server, which takes seconds to start.

import contextlib
import json
import queue
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
import safetensors.torch
import torch
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from stagepack.roads.replace import replace_weights
from tests.serve.servers import (
    Server,
    begin_stream,
    grpc_client,
    grpc_stub,
    openai_client,
    post,
    post_json,
    refused,
    stagepack_server,
)
from tests.serve.test_large_json import ask_meanwhile
from tests.serve.test_serve import metrics
from tests.text.generating_model import POSITIONS, VOCABULARY, Decoder, continue_tokens, tokenizer
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("serve")
GENERATE = "/v2/models/writer/generate"
PROMPT = "Once upon"


@pytest.fixture(scope="module")
def diverged(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same decoder after a training that diverged: its logits are NaN."""
    folder = tmp_path_factory.mktemp("diverged")
    weights = Decoder().state_dict()
    weights["head.weight"].fill_(torch.nan)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return replace_weights(writer, folder / "model.safetensors", out=folder / "diverged.stagepack").path


@pytest.fixture(scope="module")
def server(writer: Path, diverged: Path) -> Iterator[Server]:
    with stagepack_server([writer, diverged], "--max-sequences", "3") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def expected_text(prompt: str, count: int) -> str:
    """The likeliest continuation, decoded at once."""
    made = tokenizer()
    return made.decode(continue_tokens(made.encode(prompt).ids, count))


def events(port: int, path: str, body: Mapping[str, Any]) -> list[Any]:
    """The events of an answer that is a stream."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        lines = answer.read().decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_generate_answers_with_the_whole_text_or_with_its_parts(server: Server) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 20}, "id": "7"}
    status, whole, _ = post(server.http, GENERATE, json.dumps(body))
    tokens = continue_tokens(tokenizer().encode(PROMPT).ids, 20)
    named = {"model_name": "writer", "model_version": "1", "id": "7"}
    text = {"text_output": expected_text(PROMPT, 20), "output_ids": tokens, "finish_reason": "length"}
    assert len(whole.pop("weight_version")) == 64
    assert (status, whole) == (200, named | text)
    parts = events(server.http, f"{GENERATE}_stream", {"text_input": PROMPT, "max_tokens": 20})
    assert [token for part in parts for token in part["output_ids"]] == tokens
    assert "".join(part["text_output"] for part in parts) == whole["text_output"]
    assert [part.get("finish_reason") for part in parts] == [None] * 19 + ["length"]
    of_tokens = post_json(server, GENERATE, input_ids=tokenizer().encode(PROMPT).ids, max_tokens=20)[1]
    del of_tokens["weight_version"]
    assert of_tokens | {"id": "7"} == whole


def test_a_text_ends_before_a_stop_string(server: Server) -> None:
    text = expected_text(PROMPT, 20)
    stop = text[4:6]
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 20, "stop": ["never", stop]}}
    _, whole, _ = post(server.http, GENERATE, json.dumps(body))
    assert (whole["text_output"], whole["finish_reason"]) == (text[: text.index(stop)], "stop")
    parts = events(server.http, f"{GENERATE}_stream", body)
    assert "".join(part["text_output"] for part in parts) == whole["text_output"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "expected one prompt, text_input or input_ids, found none"),
        ({"text_input": "a", "input_ids": [1]}, "expected one prompt"),
        ({"text_input": 1}, "text_input: Expected `str`, got `int`"),
        ({"input_ids": [[1], [2]]}, "expected one prompt, the shape [1, -1], found [2, 1]"),
        ({"input_ids": []}, "input_ids: "),
        ({"input_ids": ["a"]}, "input_ids: expected data of INT64"),
        ({"input_ids": [True]}, "Expected `int`, got `bool`"),
        ({"input_ids": [1.5]}, "Expected `int`, got `float`"),
        ({"input_ids": [float("nan")]}, "input_ids: expected data of INT64"),
        ({"input_ids": [2**63]}, "input_ids: expected data of INT64"),
        ({"input_ids": [[1], 2]}, "found no list, or lists of other sizes"),
        ({"input_ids": [[[1]]]}, "expected one prompt, the shape [1, -1], found [1, 1, 1]"),
        ({"input_ids": {}}, "input_ids: expected data of INT64"),
        ({"input_name": [1]}, "expected one prompt, text_input or input_ids, found input_name"),
        ({"input_ids": [1, VOCABULARY]}, f"input_ids: expected tokens from 0 to {VOCABULARY - 1}, found {VOCABULARY}"),
        ({"input_ids": [-1]}, f"input_ids: expected tokens from 0 to {VOCABULARY - 1}, found -1"),
        ({"text_input": "a" * 128 * (POSITIONS + 1)}, "expected at most 128 characters for each"),
        ({"text_input": "a" * (POSITIONS + 1)}, f"the cache has {POSITIONS} positions"),
        ({"text_input": "a", "parameters": {"max_tokens": POSITIONS + 1}}, f"the cache has {POSITIONS} positions"),
        ({"text_input": "a", "parameters": 3}, "parameters: expected an object"),
        ({"text_input": "a", "parameters": {"temperatur": 3}}, "unknown field `temperatur`"),
        ({"text_input": "a", "max_tokens": "3"}, "max_tokens"),
        ({"text_input": ""}, "input_ids: the prompt has no tokens: expected one or more"),
        ({"text_input": "a", "temperature": 0, "do_sample": True}, "expected more than 0 beside `do_sample`"),
        ({"text_input": "a", "stop": [""]}, "stop"),
        ({"text_input": "a", "id": 7}, "id: expected a string of at most 1024 characters, found int"),
        ({"text_input": "a", "id": "7" * 1025}, "id: expected a string of at most 1024 characters, found 1025"),
        ({"text_input": "a", "id": float("nan")}, "id: JSON is malformed"),
        ({"text_input": "a", "temperature": float("nan")}, "temperature: JSON is malformed"),
        ({"text_input": "a", "id": "\ud800"}, "the request is not valid JSON: \\ud800 is a lone surrogate"),
        ({"text_input": "\ud800"}, "the request is not valid JSON: \\ud800 is a lone surrogate"),
        ({"text_input": "a", "stop": "\udc00"}, "the request is not valid JSON: \\udc00 is a lone surrogate"),
        ({"text_input": "\ud83d\ude00", "\ud800": "\udc01"}, "is a lone surrogate"),
        ({"input_ids": [float("nan")], "id": "\ud800"}, "the request is not valid JSON: \\ud800 is a lone surrogate"),
        ({"text_input": "a", "a": [1] * 400_000}, "expected at most 1000000 bytes of JSON beside the data"),
        ({"text_input": "a"} | {f"k{number}": 1 for number in range(1000)}, "expected at most 1000 fields"),
        ({"text_input": "a", "a": [""] * 100_001}, "expected at most 100000 lists and objects and 100000 strings"),
    ],
)
def test_a_wrong_request_is_refused(server: Server, body: Mapping[str, Any], says: str) -> None:
    for path in (GENERATE, f"{GENERATE}_stream"):
        status, answer, _ = post(server.http, path, json.dumps(body))
        assert (status, says in answer["error"]) == (400, True), answer


def test_prompts_of_strings_take_no_memory(server: Server) -> None:
    """An array of them has as many rows as there are strings, each as long as the longest one: 4 GB."""
    memory = server.memory()
    body = {"input_ids": ["a" * 100_000] + [""] * 10_000, "max_tokens": 1}
    status, answer, _ = post(server.http, GENERATE, json.dumps(body))
    assert (status, "Expected `int`, got `str`" in answer["error"]) == (400, True), answer
    status, answer, _ = post(server.http, "/v1/completions", json.dumps({"model": "writer", "prompt": [[""], ["a"]]}))
    assert (status, "Expected `int`, got `str`" in answer["error"]["message"]) == (400, True), answer
    assert server.memory() < memory + 200_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"input_ids": [1] * 4_000_000}),
        ("/v1/completions", {"model": "writer", "prompt": [1] * 4_000_000}),
        ("/v1/chat/completions", {"model": "writer", "messages": [{"role": "user", "content": "é" * 6_000_000}]}),
    ],
)
def test_others_are_answered_while_a_long_prompt_is_read(server: Server, path: str, body: dict[str, Any]) -> None:
    status, _, seconds, waits = ask_meanwhile(server, path, json.dumps(body, ensure_ascii=False).encode())
    assert status == 400
    assert max(waits) < seconds / 3, (seconds, max(waits), len(waits))


def test_texts_may_have_many_quotes(server: Server) -> None:
    body = {"text_input": '"' * 300_000, "id": "7" * 1024}
    status, answer, _ = post(server.http, GENERATE, json.dumps(body))
    assert (status, "characters for each" in answer["error"]) == (400, True), answer


def stream_responses(client: Any, inputs: Any, model: str = "writer", **options: Any) -> list[Any]:
    """The responses to one request of a stream, up to the final one."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.get_response()))
    client.async_stream_infer(model, inputs, request_id="7", **options)
    responses = []
    while True:
        response = answers.get(timeout=60)
        if isinstance(response, InferenceServerException):
            client.stop_stream()
            raise response
        responses.append(response)
        if response.parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return responses


def text_input(text: str) -> Any:
    """A prompt for gRPC."""
    tensor = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
    return tensor.set_data_from_numpy(numpy.array([text.encode()], dtype=object))


@pytest.mark.parametrize("ends_empty", [False, True])
def test_grpc_streams_a_response_for_each_token(server: Server, ends_empty: bool) -> None:
    tokens = continue_tokens(tokenizer().encode(PROMPT).ids, 12)
    with contextlib.closing(grpc_client(server.grpc)) as client:
        whole = client.infer("writer", [text_input(PROMPT)], parameters={"max_tokens": 12})
        assert whole.as_numpy("text_output")[0].decode() == expected_text(PROMPT, 12)
        responses = stream_responses(
            client, [text_input(PROMPT)], parameters={"max_tokens": 12}, enable_empty_final_response=ends_empty
        )
        parts = responses[:-1] if ends_empty else responses
        assert (len(responses), {response.id for response in responses}) == (12 + ends_empty, {"7"})
        assert [int.from_bytes(part.raw_output_contents[1], "little") for part in parts] == tokens
        assert b"".join(part.raw_output_contents[0][4:] for part in parts).decode() == expected_text(PROMPT, 12)
        assert [part.parameters["finish_reason"].string_param for part in parts] == [""] * 11 + ["length"]
        with pytest.raises(InferenceServerException, match="unknown field"):
            stream_responses(client, [text_input(PROMPT)], parameters={"tokens": 12})


TOKENS = numpy.array([[5, 6, 7]])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (TOKENS[0], "expected one prompt, the shape [1, -1], found [3]"),
        (TOKENS[None], "expected one prompt, the shape [1, -1], found [1, 1, 3]"),
        (TOKENS.repeat(2, 0), "expected one prompt, the shape [1, -1], found [2, 3]"),
        (TOKENS[:, :0], "input_ids: the prompt has no tokens"),
        ((TOKENS + 0.9).astype("float32"), "expected the datatype INT64, found FP32"),
    ],
)
def test_a_wrong_prompt_over_grpc_is_refused_alone(server: Server, tokens: numpy.ndarray, says: str) -> None:
    requests = [prompt_request("good", TOKENS), prompt_request("bad", tokens), prompt_request("good", TOKENS)]
    with grpc_stub(server) as stub:
        with refused("INVALID_ARGUMENT", says=says):
            stub.ModelInfer(requests[1], timeout=60)
        responses = list(stub.ModelStreamInfer(iter(requests), timeout=60))
    errors = [(answer.infer_response.id, says in answer.error_message) for answer in responses if answer.error_message]
    assert errors == [("bad", True)]
    assert [answer.infer_response.id for answer in responses].count("good") == 2 * 3


def prompt_request(request_id: str, tokens: numpy.ndarray) -> pb.ModelInferRequest:
    """A request for three tokens after a prompt of tokens."""
    request = pb.ModelInferRequest(model_name="writer", id=request_id, raw_input_contents=[tokens.tobytes()])
    datatype = "INT64" if tokens.dtype == "int64" else "FP32"
    request.inputs.add(name="input_ids", datatype=datatype, shape=tokens.shape)
    request.parameters["max_tokens"].int64_param = 3
    return request


def test_a_long_id_over_grpc_is_refused(server: Server) -> None:
    says = "id: expected a string of at most 1024 characters"
    with grpc_stub(server) as stub, refused("INVALID_ARGUMENT", says=says):
        stub.ModelInfer(prompt_request("7" * 1025, TOKENS), timeout=60)


def test_openai_completes_a_text(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["writer", "diverged"]
    assert client.models.retrieve("writer").owned_by == "stagepack"
    whole = client.completions.create(model="writer", prompt=PROMPT, max_tokens=20, temperature=0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected_text(PROMPT, 20), "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 20)
    parts = client.completions.create(model="writer", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    tokens = client.completions.create(model="writer", prompt=[tokenizer().encode(PROMPT).ids], temperature=0)
    assert tokens.choices[0].text == expected_text(PROMPT, 16)


def test_openai_answers_in_a_conversation(client: openai.OpenAI) -> None:
    rendered = "<user>Hi 😀<assistant>"
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi 😀"}]}]
    request: Any = {"model": "writer", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**request, max_completion_tokens=9)
    assert whole.choices[0].message.content == expected_text(rendered, 9)
    options: Any = {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(**request, **options))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == expected_text(rendered, 9)
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage == whole.usage
    everything = client.chat.completions.create(**request)
    assert everything.usage is not None
    assert everything.usage.total_tokens == POSITIONS + 1
    with pytest.raises(openai.BadRequestError, match="unknown role system"):
        client.chat.completions.create(model="writer", messages=[{"role": "system", "content": "Be brief"}])


def test_openai_draws_the_same_text_for_a_seed(client: openai.OpenAI) -> None:
    options: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 20, "temperature": 1}
    texts = [client.completions.create(**options, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("fields", "error_type", "says"),
    [
        ({"model": "reader"}, openai.NotFoundError, "unknown model 'reader'"),
        ({"n": 0}, openai.BadRequestError, "Expected `int` >= 1 - at `$.n`"),
        ({"logprobs": 21}, openai.BadRequestError, "Expected `int` <= 20 - at `$.logprobs`"),
        ({"prompt": ["a", 3]}, openai.BadRequestError, "Expected `int`, got `str`"),
        ({"prompt": []}, openai.BadRequestError, "prompt: expected a string, the tokens of one, or a list of either"),
        ({"prompt": [1, "a"]}, openai.BadRequestError, "Expected `int`, got `str`"),
        ({"prompt": [True]}, openai.BadRequestError, "Expected `int`, got `bool`"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": ""}, openai.BadRequestError, "input_ids: the prompt has no tokens"),
        ({"extra_body": {"do_sample": True}, "temperature": 0}, openai.BadRequestError, "expected more than 0"),
        ({"extra_body": {"temp": 1}}, openai.BadRequestError, "unknown field `temp`"),
        ({"extra_body": {"top_k": 3}, "user": "me", "n": 1}, None, ""),
    ],
)
def test_openai_requests_that_cannot_be_answered(
    client: openai.OpenAI, fields: Any, error_type: Any, says: str
) -> None:
    request: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 2} | fields
    expected = contextlib.nullcontext() if error_type is None else pytest.raises(error_type, match=re.escape(says))
    with expected:
        client.completions.create(**request)


def test_requests_of_openais_api_are_counted(server: Server, client: openai.OpenAI) -> None:
    labels = (("OK", "openai", "writer"), ("", "BAD_REQUEST", "openai"))
    names = [("stagepack_requests_total", *values) for values in labels]
    before = metrics(server)
    client.completions.create(model="writer", prompt="a", max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="writer", prompt="a", n=0)
    # An answer is counted when all of it is sent.
    wait_until(lambda: all(metrics(server).get(name, 0) > before.get(name, 0) for name in names), 10)


def test_generations_wait_for_a_place_and_do_not_mix(server: Server) -> None:
    prompts = [PROMPT[: 2 + number] for number in range(7)]  # more than --max-sequences

    def generate(prompt: str) -> Any:
        return post(server.http, GENERATE, json.dumps({"text_input": prompt, "max_tokens": 40}))[1]["text_output"]

    before = metrics(server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(generate, prompts)) == [expected_text(prompt, 40) for prompt in prompts]
    after = metrics(server)
    counts = {"generated_tokens_total": 40, "first_token_seconds_count": 1, "token_seconds_count": 39}
    names = [(f"stagepack_{name}", "writer") for name in counts]
    assert [after[name] - before[name] for name in names] == [len(prompts) * count for count in counts.values()]


def test_a_client_that_goes_away_frees_its_place(server: Server) -> None:
    for _ in range(4):
        begin_stream(server, f"{GENERATE}_stream", {"text_input": "a", "max_tokens": POSITIONS}).close()
    wait_until(lambda: metrics(server)["stagepack_sequences", "writer"] == 0, 10)
    wait_until(lambda: metrics(server)["stagepack_texts", "writer"] == 0, 10)
    assert metrics(server)["stagepack_pending_requests", "writer"] == 0


def test_a_deadline_ends_a_stream_with_an_error(server: Server) -> None:
    body = {"text_input": "a", "max_tokens": POSITIONS, "timeout": 30_000}
    connection = HTTPConnection("127.0.0.1", server.http, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", f"{GENERATE}_stream", json.dumps(body))
        answer = connection.getresponse()
        last_line = answer.read().decode().split("data: ")[-1]
    assert answer.status in (200, 504)  # 504 if no token came in time
    assert json.loads(last_line) == {"error": "writer: no answer before the deadline"}


def test_logits_that_are_not_numbers_are_an_error_of_the_model(server: Server) -> None:
    says = "diverged: the logits"
    path, body = GENERATE.replace("writer", "diverged"), {"text_input": "a", "temperature": 1}
    for route in (path, f"{path}_stream"):
        status, answer, _ = post(server.http, route, json.dumps(body))
        assert (status, says in answer["error"]) == (500, True), answer
    with contextlib.closing(grpc_client(server.grpc)) as client, refused("INTERNAL", says=says):
        client.infer("diverged", [text_input("a")])
    assert metrics(server)["stagepack_sequences", "diverged"] == 0


def test_the_decoder_itself_still_answers_sequences(server: Server) -> None:
    tokens = tokenizer().encode(PROMPT).ids
    with contextlib.closing(grpc_client(server.grpc)) as client:
        arrays = {
            "input_ids": numpy.array([tokens]),
            "cache_position": numpy.arange(len(tokens)),
            "attention_mask": (numpy.arange(POSITIONS) < len(tokens)).astype("int64")[None],
        }
        inputs = [
            tritonclient.grpc.InferInput(name, array.shape, "INT64").set_data_from_numpy(array)
            for name, array in arrays.items()
        ]
        answer = client.infer("writer", inputs, sequence_id=3, sequence_start=True, sequence_end=True)
        assert answer.as_numpy("output").argmax() == continue_tokens(tokens, 1)[0]
