"""Texts that grow by tokens, strings that end them, and chat templates of strangers."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_text.server import chat_template as chat_template_module
from stagepack_text.server.chat_template import ChatTemplate
from stagepack_text.server.text_stream import StopStrings, TextFormat
from tests.text.generating_model import tokenizer

TEXT = "Hällo, 你好 😀!"


def llama_tokenizer() -> Tokenizer:
    """Words, and bytes where there is no word, as in the tokenizers of Llama 2 and Gemma."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "好", "▁wor", "ld"]
    vocabulary = {word: token for token, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=words[0], byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def t5_tokenizer() -> Tokenizer:
    """Words, as in the tokenizer of T5."""
    words = ["<pad>", "</s>", "<unk>", "▁", "▁a", "b", "好", "▁wor", "ld", "é"]
    made = Tokenizer(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], 2))
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.decoder = decoders.Metaspace()
    return made


@pytest.mark.parametrize("make_tokenizer", [tokenizer, llama_tokenizer, t5_tokenizer])
def test_parts_of_a_text_are_the_text_decoded_at_once(make_tokenizer: Any) -> None:
    made = make_tokenizer()
    text_format, text_tokens = TextFormat(made, None), made.encode(TEXT).ids
    draw = random.Random(0)  # noqa: S311 - reproducible
    for round_number in range(300):
        noise = [draw.randrange(made.get_vocab_size() + 2) for _ in range(draw.randrange(20))]
        tokens = [*text_tokens, *noise, *text_tokens] if round_number % 2 else noise
        stream = text_format.start_text()
        parts = [stream.add(token) for token in tokens] + [stream.finish()]
        assert "".join(parts) == made.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("make_tokenizer", [tokenizer, llama_tokenizer, t5_tokenizer])
def test_the_bytes_of_tokens_are_those_of_their_text(make_tokenizer: Any) -> None:
    made = make_tokenizer()
    text_format, tokens = TextFormat(made, None), make_tokenizer().encode("a world é好").ids
    tokens = [token for token in tokens if not text_format.is_special(token)]
    content = b"".join(text_format.token_bytes(token) for token in tokens).decode()
    assert content.lstrip(" ") == made.decode(tokens) == text_format.decode(tokens)
    assert text_format.token_bytes(made.token_to_id("</s>")) == b"</s>"


def test_a_character_is_sent_when_its_last_byte_has_come() -> None:
    made = tokenizer()
    stream = TextFormat(made, None).start_text()
    parts = [stream.add(token) for token in made.encode("a😀b").ids]
    assert parts == ["a", "", "", "", "😀", "b"]


def test_a_tokenizer_that_panics_is_an_error_of_the_request() -> None:
    made = tokenizer()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    with pytest.raises(RequestError, match=r"the tokenizer of the bundle fails on the text: .*retry-limit"):
        TextFormat(made, None).encode("a" * 40 + "b", adds_special_tokens=True)


@pytest.mark.parametrize("stops", [["END"], ["END", "N"], ["😀 END"], ["DE", "EE"], ["absent"]])
@pytest.mark.parametrize("part_length", [1, 2, 5, 100])
def test_a_stop_string_ends_a_text_wherever_it_is_torn(stops: Sequence[str], part_length: int) -> None:
    text = "EEN ENE 😀 END END"
    found, sent = StopStrings(stops), ""
    for start in range(0, len(text), part_length):
        sent += found.add(text[start : start + part_length])
        if found.is_found:
            break
    sent += found.finish()
    positions = [text.find(stop) for stop in stops if stop in text]
    # The string that begins first counts, of two that end in the same part.
    expected = text[: min(positions)] if positions else text
    assert sent == expected or (part_length < 100 and expected.startswith(sent))
    assert found.is_found == bool(positions)


def render(template: str, messages: list[dict[str, Any]]) -> str:
    async def run() -> str:
        with contextlib.closing(ChatTemplate(template, {"bos_token": "<s>"})) as chat_template:
            return await chat_template.render(messages)

    return asyncio.run(run())


def test_a_template_has_what_transformers_gives_it() -> None:
    template = (
        "{{ bos_token }}{%- for message in messages %}\n  {% if loop.first %}{% continue %}{% endif %}"
        "{{ message.content | tojson }}{% generation %}g{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert render(template, [{"role": "user", "content": "no"}, {"role": "user", "content": "<ä>"}]) == '<s>"<ä>"g4'


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: TemplateError: roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ 'a'.center(10 ** 10) }}", "MemoryError"),
        (r"{{ '\ud800' }}", "lone surrogates"),
        (r"{{ raise_exception('\ud800') }}", "lone surrogates"),
        ("{% for i in range(90000) %}{{ 'a' * 90000 }}{% endfor %}", "at most 1000000 characters"),
    ],
)
def test_a_template_of_a_stranger_is_bounded(template: str, says: str) -> None:
    with pytest.raises(RequestError, match="the chat template of the bundle") as raised:
        render(template, [{"role": "user", "content": "hi"}])
    assert says in str(raised.value)


def test_a_template_answers_again_after_one_that_did_not_survive() -> None:
    async def run() -> list[str]:
        endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
        template = "{% if messages[0].content == 'loop' %}" + endless + "{% endif %}ok"
        with contextlib.closing(ChatTemplate(template, {})) as chat_template:
            texts = [await chat_template.render([{"content": "a"}])]
            with pytest.raises(RequestError, match="took too much time or memory"):
                await chat_template.render([{"content": "loop"}])
            return [*texts, await chat_template.render([{"content": "b"}])]

    assert asyncio.run(run()) == ["ok", "ok"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_costs_its_conversation_alone(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_module, "_MAX_SECONDS", 3.0)
    template = (
        "{% if messages %}{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}{% endif %}ok"
    )

    async def run() -> None:
        with contextlib.closing(ChatTemplate(template, {})) as chat_template:
            assert await chat_template.render([]) == "ok"
            [process] = chat_template._processes
            process.send_signal(signal.SIGSTOP)
            lost = asyncio.create_task(chat_template.render([{"content": "a"}]))
            await asyncio.sleep(0.1)
            process.send_signal(number)
            assert await asyncio.wait_for(chat_template.render([{"content": "b"}]), 2.5) == "ok"
            with pytest.raises(RequestError, match=r"was killed, or hung for 3 s: try again") as raised:
                await lost
            assert raised.value.status is RequestStatus.STAGE_LOST
            assert await chat_template.render([{"content": "c"}]) == "ok"
            assert process.returncode == -signal.SIGKILL

    asyncio.run(run())


def test_conversations_that_wait_for_a_template_hold_up_nothing_else() -> None:
    async def run() -> tuple[float, str]:
        slow_template = "{% if messages %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{% endif %}ok"
        with contextlib.closing(ChatTemplate(slow_template, {})) as chat_template:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
            renders = [asyncio.create_task(chat_template.render([{"content": "a"}])) for _ in range(30)]
            await asyncio.sleep(0.2)
            start_time = time.monotonic()
            await asyncio.to_thread(time.monotonic)
            waiting_seconds = time.monotonic() - start_time
            for render_task in renders:
                render_task.cancel()
            return waiting_seconds, await asyncio.wait_for(chat_template.render([]), 10)

    waiting_seconds, text = asyncio.run(run())
    assert waiting_seconds < 5
    assert text == "ok"
