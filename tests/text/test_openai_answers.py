"""What answers of OpenAI's API say of tokens, and how their events are written."""

import asyncio
import json
import math
import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from stagepack_text.openai.answers import ScoredToken, TextAnswer, TextChoice
from stagepack_text.openai.requests import ChatFields, CompletionFields, decode_openai_request
from stagepack_text.sampling import TokenLogprobs
from stagepack_text.server.text_route import AnswerChannel
from stagepack_text.server.text_stream import TextFormat
from tests.text.generating_model import decoded_parts, tokenizer
from tests.text.test_generated_texts import TEXT, llama_tokenizer, t5_tokenizer

TOKENIZERS = [tokenizer, llama_tokenizer, t5_tokenizer]
SURE = TokenLogprobs(0.0, ())


def answer(text_format: TextFormat, tokens: list[int], prompt: str = "", logprobs: TokenLogprobs = SURE) -> Any:
    """A completion of these tokens, whole and in events."""
    body = json.dumps({"model": "m", "prompt": "", "logprobs": 0, "stream": True}).encode()
    choices = [
        TextChoice(TextAnswer(decode_openai_request(bytearray(body), CompletionFields), text_format, None), 0)
        for _ in "ab"
    ]
    events = []
    for choice in choices if prompt else ():
        choice.echo(
            prompt, [ScoredToken(token, None) for token in text_format.encode(prompt, adds_special_tokens=False)]
        )
    for part in decoded_parts(text_format, tokens):
        choices[0].add(replace(part, logprobs=logprobs))
        events += choices[1].add(replace(part, logprobs=logprobs))
    return choices[0].whole(), [event["choices"][0] for event in events]


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_each_token_of_a_text_begins_where_its_offset_says(make_tokenizer: Any) -> None:
    text_format = TextFormat(make_tokenizer(), None)
    for text in (TEXT, "a world", " a  world", "😀好é", "é a 😀 world好b"):
        tokens = [
            token for token in text_format.encode(text, adds_special_tokens=False) if not text_format.is_special(token)
        ]
        whole, events = answer(text_format, tokens)
        contents = [text_format.token_bytes(token) for token in tokens]
        dropped = len(b"".join(contents).decode()) - len(whole["text"])
        before = accumulate(contents, initial=b"")
        expected = [max(0, len(content.decode(errors="ignore")) - dropped) for content in before][:-1]
        offsets = whole["logprobs"]["text_offset"]
        assert offsets == expected
        assert [offset for event in events for offset in event["logprobs"]["text_offset"]] == offsets
        echoed, _ = answer(text_format, tokens, prompt=text)
        assert echoed["logprobs"]["text_offset"][-len(tokens) :] == [len(text) + offset for offset in offsets]


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_tokens_that_are_no_text_together_have_offsets_too(make_tokenizer: Any) -> None:
    """4,500 texts of random tokens, of which most bytes are no characters."""
    text_format, draw, count = TextFormat(make_tokenizer(), None), random.Random(0), 0  # noqa: S311 - reproducible
    size = text_format.tokenizer.get_vocab_size()
    for _ in range(1500):
        tokens = [draw.randrange(size) for _ in range(draw.randrange(1, 12))]
        whole, events = answer(text_format, tokens)
        text, offsets = whole["text"], whole["logprobs"]["text_offset"]
        assert [offset for event in events for offset in event["logprobs"]["text_offset"]] == offsets
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            name = text_format.token_bytes(token).decode(errors="ignore")
            if not text_format.is_special(token) and name.encode() == text_format.token_bytes(token):
                count += 1
                # The first space of a text is dropped, and each byte of a run that is no UTF-8 is replaced.
                is_there = text.startswith((name, "\ufffd" * len(name)), offset)
                assert is_there or text.startswith(name.lstrip(" "), offset)
    assert count > 2000


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_token_that_cannot_be_has_a_logprob_in_json(is_chat: bool) -> None:
    fields: Any = {"messages": [], "logprobs": True, "top_logprobs": 2} if is_chat else {"prompt": "", "logprobs": 2}
    request = decode_openai_request(
        bytearray(json.dumps({"model": "m", **fields}).encode()), ChatFields if is_chat else CompletionFields
    )
    choice = TextChoice(TextAnswer(request, TextFormat(tokenizer(), None), None), 0)
    impossible = TokenLogprobs(-math.inf, ((5, 0.0), (6, -math.inf)))
    choice.echo("", [ScoredToken(7, impossible)])
    written = json.dumps(choice.whole(), allow_nan=False)
    assert written.count("-9999.0") == (2 if is_chat else 3)


def test_an_event_is_one_line_for_every_client() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    event = {"text": "".join(map(chr, range(0x3000))), "key\u2028": "\x85"}
    asyncio.run(AnswerChannel({"type": "http"}, None, send).send_event(event))  # type: ignore[arg-type]
    content = sent[-1]["body"].decode()
    [line, empty] = content.splitlines()
    assert (json.loads(line.removeprefix("data: ")), empty) == (event, "")
