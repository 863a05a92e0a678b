"""Embeddings over the server, in OpenAI's API, by its own client."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import openai
import pytest

import stagepack
from stagepack_text.openai.requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    decode_openai_request,
)
from tests.sentence_models import HIDDEN, POSITIONS, TEXTS, sentence_model, sentence_transformers, tokenizer
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import openai_client, post
from tests.serve.test_serve import metrics

DIMENSION = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    modules = sentence_transformers().sentence_transformer.modules
    pooling = modules.Pooling(HIDDEN, include_prompt=False)
    made = sentence_model(tmp_path_factory.mktemp("m"), pooling, modules.Dense(HIDDEN, DIMENSION), modules.Normalize())
    made[0].model.config.matryoshka_dimensions = [4, 8]
    made.prompts = {"query": "query : "}
    return made


@pytest.fixture(scope="module")
def static() -> Any:
    modules = sentence_transformers().sentence_transformer.modules
    embedding = modules.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=DIMENSION)
    return sentence_transformers().SentenceTransformer(modules=[embedding], device="cpu")


@pytest.fixture(scope="module")
def server(model: Any, static: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("bundles")
    for name, made in (("sentences", model), ("static", static)):
        stagepack.export(made, out=folder / f"{name}.stagepack")
    paths = [folder / "sentences.stagepack", folder / "static.stagepack"]
    with local_server(paths, "--max-delay-ms", "300") as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def vectors(answer: Any) -> Any:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return numpy.array([item.embedding for item in answer.data], numpy.float32)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.omit])
def test_texts_get_what_encode_gives_them(client: openai.OpenAI, model: Any, encoding_format: Any) -> None:
    texts = TEXTS * 9  # more than run together
    answer = client.embeddings.create(model="sentences", input=texts, encoding_format=encoding_format)
    if encoding_format == "base64":
        encoded: list[Any] = [item.embedding for item in answer.data]
        rows = [numpy.frombuffer(base64.b64decode(row), "<f4") for row in encoded]
        assert numpy.array_equal(rows, model.encode(texts))
    else:
        assert numpy.array_equal(vectors(answer), model.encode(texts))
    tokens = model.tokenizer(texts, truncation=True)["input_ids"]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "sentences", "embedding")


def test_one_text_and_tokens_are_inputs(client: openai.OpenAI, model: Any) -> None:
    expected = model.encode(TEXTS[:2])
    rows = model.tokenizer(TEXTS[:2], truncation=True)["input_ids"]
    for single, whole in ((TEXTS[0], expected[0]), (rows[0], model.encode(TEXTS[0]))):
        assert numpy.allclose(vectors(client.embeddings.create(model="sentences", input=single)), whole, atol=1e-6)
    assert numpy.array_equal(vectors(client.embeddings.create(model="sentences", input=rows)), expected)


def test_static_embeddings_are_served_too(client: openai.OpenAI, static: Any) -> None:
    answer = client.embeddings.create(model="static", input=TEXTS)
    assert numpy.array_equal(vectors(answer), static.encode(TEXTS))
    rows = [static.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS[:2]]
    assert numpy.array_equal(vectors(client.embeddings.create(model="static", input=rows)), static.encode(TEXTS[:2]))


def test_prompts_have_names(client: openai.OpenAI, model: Any) -> None:
    answer = client.embeddings.create(model="sentences", input=TEXTS[:3], extra_body={"prompt_name": "query"})
    assert numpy.array_equal(vectors(answer), model.encode(TEXTS[:3], prompt_name="query"))


def test_dimensions_are_those_that_the_model_names(client: openai.OpenAI, model: Any) -> None:
    answer = client.embeddings.create(model="sentences", input=TEXTS, dimensions=8)
    expected = model.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    assert numpy.allclose(vectors(answer), expected, atol=1e-6)
    whole = client.embeddings.create(model="static", input=TEXTS, dimensions=DIMENSION)
    assert vectors(whole).shape == (len(TEXTS), DIMENSION)


def test_rows_of_several_requests_share_a_batch(client: openai.OpenAI, server: LocalServer, model: Any) -> None:
    labels = ("stagepack_batch_rows_sum", "sentences"), ("stagepack_batch_rows_count", "sentences")
    before = [metrics(server).get(label, 0) for label in labels]
    texts = ["how do i", "bake a bread", "the stocks fell", "on monday the"] * 4
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [*pool.map(lambda text: client.embeddings.create(model="sentences", input=text), texts)]
    expected = [model.encode(text) for text in texts]
    assert numpy.allclose([vectors(answer)[0] for answer in answers], expected, atol=1e-6)
    rows, batches = (metrics(server)[label] - earlier for label, earlier in zip(labels, before, strict=True))
    assert rows == len(texts)
    assert batches < len(texts)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input: expected a text"),
        ({"input": [[]]}, "input: expected a text"),
        ({"input": ["a", [1]]}, "input: expected a text"),
        ({"input": [1, "a"]}, "input: expected a text"),
        ({"input": ["a"] * 2049}, "1 to 2048 texts"),
        ({"input": [True]}, "input: expected a text"),
        ({"input": [10**30]}, "input: expected a text"),
        ({"input": [1] * (POSITIONS + 1)}, f"input: expected at most {POSITIONS} tokens, found {POSITIONS + 1}"),
        ({"input": [128]}, "input: expected tokens from 0 to 127, found 128"),
        ({"input": [[3, 2], [2**40, -1]]}, "input: expected tokens from 0 to 127, found -1"),
        ({"model": "static", "input": [[0], [72]]}, "input: expected tokens from 0 to 71, found 72"),
        ({"model": "static", "input": [-1]}, "input: expected tokens from 0 to 71, found -1"),
        ({"dimensions": 5}, "dimensions: expected 4, 8, found 5"),
        ({"model": "static", "dimensions": 4}, "dimensions: the model does not say that its embeddings may be cut"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"extra_body": {"prompt_name": "title"}}, "expected a prompt of the model .*'query'.*, found 'title'"),
        ({"extra_body": {"truncate": True}}, "unknown field `truncate`"),
    ],
)
def test_requests_that_cannot_be_answered(client: openai.OpenAI, fields: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        client.embeddings.create(**{"model": "sentences", "input": "a"} | fields)
    assert raised.value.type == "invalid_request_error"
    [wrong_name] = fields.keys() - {"model"}
    assert raised.value.param == (
        "truncate" if "truncate" in says else "prompt_name" if wrong_name == "extra_body" else wrong_name
    )


def test_errors_below_v1_have_the_form_of_openai(client: openai.OpenAI, server: LocalServer) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model 'reader'") as raised:
        client.embeddings.create(model="reader", input="a")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="the model does not generate"):
        client.completions.create(model="sentences", prompt="a")
    with pytest.raises(openai.NotFoundError, match="the model 'reader' does not exist"):
        client.models.retrieve("reader")
    assert {found.id for found in client.models.list()} == {"sentences", "static"}
    for path, code, body in (
        ("/v1/images/generations", "unknown_url", b"{}"),
        ("/v1/models", "method_not_supported", b"{}"),
        ("/v1/embeddings", None, b"{"),
        ("/v1/embeddings", None, b"x" * 17_000_000),
    ):
        _, answer, _ = post(server.http, path, body)
        assert answer["error"].keys() == {"message", "type", "param", "code"}, path
        assert (answer["error"]["type"], answer["error"]["code"]) == ("invalid_request_error", code)
    _, answer, _ = post(server.http, "/v2/models/reader/infer", b"{}")
    assert isinstance(answer["error"], str)


@pytest.mark.parametrize(
    ("fields_type", "text"),
    [(EmbeddingFields, {"input": "a"}), (CompletionFields, {"prompt": "a"}), (ChatFields, {"messages": []})],
)
def test_fields_that_change_no_answer_are_named_in_the_log(
    fields_type: Any, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ignored = {"user": "me", "metadata": {}, "store": False, "reasoning_effort": "low", "safety_identifier": "x"}
    with caplog.at_level("INFO", "stagepack.serve"):
        body = json.dumps({"model": "m", **text, **ignored}).encode()
        fields = decode_openai_request(bytearray(body), fields_type)
    assert fields.model == "m"
    assert [message for message in caplog.messages if "change no answer" in message] == [
        "ignored fields of a request, which change no answer: metadata, reasoning_effort, safety_identifier, store, user"
    ]
