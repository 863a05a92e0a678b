"""OpenAI's API as its clients meet it."""

import ast
import collections
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params

import stagepack
from stagepack_text.openai.requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    use_of_field,
)
from stagepack_text.server.text_stream import TextFormat
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import begin_stream, openai_client, post
from tests.serve.test_serve import metrics
from tests.text.generating_model import POSITIONS, VOCABULARY, Decoder, tokenizer
from tests.waiting import wait_until

PROMPT = "Once upon"
TEXT_FORMAT = TextFormat(tokenizer(), None)


@pytest.fixture(scope="module")
def server(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("writer")
    bundle = shutil.copytree(writer, folder / "writer.stagepack")
    # With tokens up to the end of the vocabulary, and one that has no logits.
    larger = tokenizer()
    larger.add_tokens(["<last but one>", "<last>", "<unscored>"])
    (folder / "tokenizer.json").write_text(larger.to_str())
    stagepack.add_assets(bundle, [folder / "tokenizer.json"], overwrite=True)
    with local_server([bundle], "--max-sequences", "3") as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(model="writer", prompt=prompt, **fields)


NULLABLE_FIELDS = (
    "best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix temperature"
    " top_p user top_k min_p repetition_penalty do_sample"
)


def test_null_is_as_if_a_field_was_absent(server: LocalServer) -> None:
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


@pytest.mark.parametrize("prompt", [[-1], [3, -(2**60)], [VOCABULARY + 1]])
def test_tokens_outside_the_vocabulary_are_refused(client: openai.OpenAI, prompt: list[int]) -> None:
    with pytest.raises(openai.BadRequestError, match="expected tokens from 0 to"):
        complete(client, prompt)


def drawn(client: openai.OpenAI, prompt: str, seed: int) -> str:
    return complete(client, prompt, seed=seed, max_tokens=9).choices[0].text


def test_several_prompts_have_n_texts_each(client: openai.OpenAI) -> None:
    prompts = ["Once", "upon", "a time"]
    expected = [drawn(client, prompt, seed) for prompt in prompts for seed in (3, 4)]
    whole = complete(client, prompts, seed=3, n=2, max_tokens=9)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (14, 54)
    as_tokens = [tokenizer().encode(prompt).ids for prompt in prompts]
    assert complete(client, as_tokens, seed=3, n=2, max_tokens=9).choices == whole.choices
    texts, reasons = [""] * 6, [""] * 6
    for event in complete(client, prompts, seed=3, n=2, max_tokens=9, best_of=2, stream=True):
        [choice] = event.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert (texts, reasons) == (expected, ["length"] * 6)


def test_a_client_that_goes_away_frees_the_places_of_all_texts(server: LocalServer) -> None:
    body = {"model": "writer", "prompt": ["a", "b"], "n": 4, "max_tokens": 90, "stream": True}
    begin_stream(server, "/v1/completions", body).close()
    wait_until(lambda: metrics(server)["stagepack_sequences", "writer"] == 0, 10)
    assert metrics(server)["stagepack_pending_requests", "writer"] == 0


def test_others_are_answered_while_a_request_has_many_texts(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(complete, client, ["a"] * 16, n=128, max_tokens=1)
        time.sleep(0.5)
        assert len(complete(client, max_tokens=1).choices) == 1
        assert not many.done()
        assert len(many.result().choices) == 2048


def test_a_chat_has_n_answers(client: openai.OpenAI) -> None:
    request: Any = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "seed": 3, "max_tokens": 9}
    whole = client.chat.completions.create(**request, n=2)
    alone = [client.chat.completions.create(**request | {"seed": seed}) for seed in (3, 4)]
    expected = [answer.choices[0].message.content for answer in alone]
    assert [choice.message.content for choice in whole.choices] == expected
    texts, roles = ["", ""], []
    for event in client.chat.completions.create(**request, n=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content
        roles += [event.choices[0].index] if event.choices[0].delta.role else []
    assert (texts, sorted(roles)) == (expected, [0, 1])


@pytest.mark.parametrize(
    ("fields", "says", "wrong_name"),
    [
        ({"n": 129}, "Expected `int` <= 128", "n"),
        ({"prompt": ["a"] * 1025, "n": 2}, "with `n` for 1 to 2048 texts in all, found 1025 prompts", "prompt"),
        ({"n": 2, "best_of": 3}, "best_of: expected that of n, 2", "best_of"),
        ({"prompt": ["a", [1]]}, "Expected `int`, got `str`", "prompt"),
        ({"prompt": [[1], "a"]}, "expected data of INT64", "prompt"),
        ({"prompt": ["a", "b" * (POSITIONS + 1)]}, "context length", "prompt"),
        ({"max_tokens": 0}, "max_tokens: expected 1 or more, or `echo`", "max_tokens"),
        ({"suffix": "b"}, "suffix: this server does not support it", "suffix"),
        ({"prompt": [[]]}, "input_ids: the prompt has no tokens", "prompt"),
        (
            {"prompt": "a<unscored>", "echo": True, "logprobs": 0},
            f"logprobs: expected tokens that the model has logits of, 0 to {VOCABULARY - 1}, beside `echo`, found {VOCABULARY}",
            "logprobs",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(client: openai.OpenAI, fields: Any, says: str, wrong_name: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, **fields)
    assert says in raised.value.message
    assert raised.value.param == wrong_name


def scores(tokens: list[int]) -> Any:
    """The logprobs of the next token at each position, [length, vocabulary], by the model without a cache."""
    torch.manual_seed(0)
    decoder, rows = Decoder().eval(), []
    for length in range(1, len(tokens) + 1):
        mask = (torch.arange(POSITIONS) < length).long()[None]
        positions = torch.arange(length)
        with torch.no_grad():
            rows.append(
                decoder(input_ids=torch.tensor([tokens[:length]]), cache_position=positions, attention_mask=mask)[0]
            )
    return torch.stack(rows).log_softmax(-1)


def test_logprobs_of_a_completion_are_those_of_the_logits(client: openai.OpenAI) -> None:
    options: Any = {"max_tokens": 12, "temperature": 0.5, "seed": 1, "frequency_penalty": 1.0, "logit_bias": {"65": 3}}
    whole = complete(client, logprobs=3, **options).choices[0]
    plain = complete(client, **options).choices[0]
    assert (whole.text, plain.logprobs) == (plain.text, None)
    given = whole.logprobs
    contents = [token_content(token) for token in given.tokens]
    assert b"".join(contents).decode(errors="replace") == whole.text
    new_tokens = [token_of(content) for content in contents]
    expected = scores([*tokenizer().encode(PROMPT).ids, *new_tokens])[len(PROMPT) - 1 :]
    for position, token in enumerate(new_tokens):
        assert given.token_logprobs[position] == pytest.approx(float(expected[position, token]), abs=1e-4)
        likeliest = expected[position].topk(3)
        found = given.top_logprobs[position]
        assert set(found) >= {text_of(int(likely)) for likely in likeliest.indices}
        assert len(found) <= 4
        assert max(found.values()) == pytest.approx(float(likeliest.values[0]), abs=1e-4)
    own = complete(client, logprobs=0, **options).choices[0].logprobs
    assert own.token_logprobs == given.token_logprobs
    assert [list(top) for top in own.top_logprobs] == [[token] for token in own.tokens]
    parts = [part.choices[0] for part in complete(client, logprobs=3, stream=True, **options)]
    assert [token for part in parts for token in part.logprobs.tokens] == given.tokens
    assert [offset for part in parts for offset in part.logprobs.text_offset] == given.text_offset


def token_content(token: str) -> bytes:
    return ast.literal_eval(f"b'{token.removeprefix('bytes:')}'") if token.startswith("bytes:") else token.encode()


def token_of(content: bytes) -> int:
    return next(token for token in range(VOCABULARY) if TEXT_FORMAT.token_bytes(token) == content)


def text_of(token: int) -> str:
    content = TEXT_FORMAT.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def test_an_echo_has_the_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    options: Any = {"max_tokens": 5, "temperature": 0}
    plain = complete(client, **options).choices[0].text
    assert complete(client, echo=True, **options).choices[0].text == PROMPT + plain
    echoed = complete(client, ["Oh", PROMPT], echo=True, logprobs=2, n=2, **options).choices
    assert [choice.text for choice in echoed[2:]] == [PROMPT + plain] * 2
    tokens = tokenizer().encode(PROMPT).ids
    expected = scores(tokens)
    given = echoed[2].logprobs
    assert given == echoed[3].logprobs
    assert (given.token_logprobs[0], given.top_logprobs[0]) == (None, None)
    assert given.token_logprobs[1 : len(tokens)] == pytest.approx(
        [float(expected[position, token]) for position, token in enumerate(tokens[1:])], abs=1e-4
    )
    assert given.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))
    alone = complete(client, tokens, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert (alone.text, alone.finish_reason) == (PROMPT, "length")
    assert alone.logprobs.token_logprobs == given.token_logprobs[: len(tokens)]
    streamed = list(complete(client, echo=True, stream=True, **options))
    assert "".join(event.choices[0].text for event in streamed) == PROMPT + plain


def test_logprobs_of_a_chat_are_objects(client: openai.OpenAI) -> None:
    request: Any = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    request |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert b"".join(bytes(token.bytes or ()) for token in content).decode(errors="replace") == choice.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)
    assert [len(token.top_logprobs) for token in content] == [2] * 8
    parts = list(client.chat.completions.create(**request, stream=True))
    assert [token for part in parts for token in part.choices[0].logprobs.content or ()] == content
    with pytest.raises(openai.BadRequestError, match="top_logprobs: expected `logprobs` to be true"):
        client.chat.completions.create(**request | {"logprobs": False})


@pytest.mark.parametrize("stop", [None, "", [], [""]])
def test_a_stop_of_nothing_ends_no_text(client: openai.OpenAI, stop: Any) -> None:
    assert complete(client, temperature=0, stop=stop).choices[0].finish_reason == "length"


@pytest.mark.parametrize("is_list", [False, True])
def test_a_stop_string_ends_each_text(client: openai.OpenAI, is_list: bool) -> None:
    [token] = tokenizer().encode("b").ids
    options: Any = {"temperature": 0, "logit_bias": {str(token): 100}, "stop": ["x", "bbb"] if is_list else "bbb"}
    for choice in complete(client, ["a", "c"], **options).choices:
        assert (choice.text, choice.finish_reason) == ("", "stop")
    echoed = complete(client, "bbbb", echo=True, **options | {"max_tokens": 2}).choices[0]
    assert (echoed.text, echoed.finish_reason) == ("bbbbbb", "length")


KINDS: dict[str, tuple[type[Any], Any]] = {
    "completions": (CompletionFields, completion_create_params.CompletionCreateParamsBase),
    "chat": (ChatFields, chat_params.CompletionCreateParamsBase),
    "embeddings": (EmbeddingFields, embedding_create_params.EmbeddingCreateParams),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_has_every_field_of_a_request(kind: str) -> None:
    """The fields of OpenAI's own client, and those of this server."""
    fields_type, client_type = KINDS[kind]
    uses = {name: use for name, kinds, use in field_rows("field of a request") if kind in kinds}
    assert uses.keys() == client_type.__annotations__.keys() | set(fields_type.__struct_fields__)
    assert uses == {name: use_of_field(fields_type, name) for name in uses}


def test_the_reference_has_every_field_of_an_answer(client: openai.OpenAI) -> None:
    """The fields of the types of OpenAI's own client, and those that this server sends."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    request: Any = {"model": "writer", "messages": messages, "max_tokens": 1}
    events = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    whole, text = client.chat.completions.create(**request), complete(client, max_tokens=1)
    objects: dict[str, list[Any]] = {
        "answer": [whole, text],
        "event": events,
        "choice": [whole.choices[0], text.choices[0], events[0].choices[0]],
        "message": [whole.choices[0].message, events[0].choices[0].delta],
        "usage": [whole.usage, text.usage, events[-1].usage],
    }
    for kind, examples in objects.items():
        uses = {name: use for name, kinds, use in field_rows("field of an answer") if kind in kinds}
        known_fields = {name for example in examples for name in type(example).model_fields}
        sent_fields = {name for example in examples for name in example.model_fields_set}
        # Fields of answers and of events are in one row.
        assert known_fields - uses.keys() == set()
        assert sent_fields | {"tool_calls"} >= {name for name, use in uses.items() if use == "served"}
        assert sent_fields <= {name for name, use in uses.items() if use == "served"}


def field_rows(title: str) -> Iterator[tuple[str, list[str], str]]:
    """The fields in a table of the reference: the name, the requests that have it, and the first word on it."""
    page = (Path(__file__).parents[2] / "docs/reference/server.md").read_text()
    table = page.split(f"| {title} |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, kinds, use = line.strip("| ").split(" | ", 2)
        for name in names.split(", "):
            yield name.strip("`"), kinds.split(", "), re.split(r"\W", use)[0]
