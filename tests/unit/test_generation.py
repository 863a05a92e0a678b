"""The choice of tokens, compared with transformers' own."""

# Long because all its tests compare with one small model of transformers.

import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    PreTrainedTokenizerFast,
    StopStringCriteria,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

import stagepack
from stagepack.errors import InputError, OptionError, UnsupportedError
from stagepack_loaders.decoders import DecoderFacts, decoder_facts
from stagepack_text.export.generation import generating_model
from stagepack_text.loop.token_loop import TokenLoop, row_inputs
from stagepack_text.settings import GenerationSettings, read_settings
from stagepack_text.token_texts import StopStringMatcher
from tests.text.generating_families import make_model
from tests.text.generating_model import tokenizer as byte_tokenizer
from tools import benchmark_models

POSITIONS = 64


@pytest.fixture(scope="module")
def llama() -> Any:
    model = benchmark_models.llama(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=2, vocab_size=99)
    # Logits that differ as those of trained models do.
    model.lm_head.weight.data *= 30
    return model


def run_loop(model: Any, tokens: Any, mask: Any, settings: GenerationSettings) -> tuple[Any, list[Any]]:
    """The tokens of a loop whose calls read the whole texts: without a cache, all inputs but the mask come from the loop."""
    facts = DecoderFacts(max_positions=POSITIONS, logits=None, takes_encoder=False, encoder_positions=None)  # type: ignore[arg-type]
    loop = TokenLoop(facts, settings, tokens.numpy(), mask.numpy())
    while not loop.is_finished:
        inputs = loop.next_inputs()
        read = torch.from_numpy(inputs["attention_mask"][:, : loop.tokens.shape[1]])
        assert inputs["cache_position"].tolist() == list(range(loop.tokens.shape[1]))[-inputs["input_ids"].shape[1] :]
        with torch.no_grad():
            logits = model(
                input_ids=torch.from_numpy(loop.tokens),
                attention_mask=read,
                position_ids=(read.cumsum(-1) - 1).clamp(min=0),
            ).logits
        loop.take(logits[:, -1].numpy())
    return torch.from_numpy(loop.tokens), loop.finish_reasons


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"suppress_tokens": [3, 17], "begin_suppress_tokens": [5]},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"do_sample": True, "top_p": 0.8, "top_k": 20},
        {"do_sample": True, "min_p": 0.1, "top_k": 0, "repetition_penalty": 1.2, "temperature": 1.4},
    ],
)
def test_tokens_are_those_of_transformers(llama: Any, options: dict[str, Any]) -> None:
    tokens = torch.randint(0, 99, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) >= torch.tensor([[0], [2], [6], [3]])).long()
    options = {"max_new_tokens": 30, "eos_token_id": [9, 41], "pad_token_id": 0} | options
    for seed in range(3):
        torch.manual_seed(seed)
        expected = llama.generate(tokens, attention_mask=mask, **options)
        settings = GenerationSettings().override(options | {"seed": seed})
        generated, reasons = run_loop(llama, tokens, mask, settings)
        assert torch.equal(generated, expected)
        assert all(
            (reason == "length") != bool({9, 41} & set(row[7:]))
            for reason, row in zip(reasons, expected.tolist(), strict=True)
        )


class OpenAIPenalties(LogitsProcessor):
    """The formula of OpenAI's documentation, for transformers."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, tokens: Any, scores: Any) -> Any:
        new_tokens = tokens[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new_tokens, torch.ones_like(new_tokens, dtype=scores.dtype))
        return scores - counts * self.frequency - (counts > 0) * self.presence


@pytest.mark.parametrize("do_sample", [False, True])
def test_penalties_of_openai_are_those_of_its_formula(llama: Any, do_sample: bool) -> None:
    tokens = torch.randint(1, 99, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 30, "eos_token_id": [], "pad_token_id": 0, "do_sample": do_sample}
    mask, bias = torch.ones_like(tokens), {3: 4.0, 17: -100.0}
    torch.manual_seed(5)
    expected = llama.generate(
        tokens,
        attention_mask=mask,
        logits_processor=[OpenAIPenalties(7, 0.5, 1.5)],
        sequence_bias={(token,): value for token, value in bias.items()},
        **options,
    )
    options |= {"presence_penalty": 0.5, "frequency_penalty": 1.5, "logit_bias": bias, "seed": 5}
    generated, _ = run_loop(llama, tokens, mask, GenerationSettings().override(options))
    assert torch.equal(generated, expected)


def llama_2_tokenizer() -> Tokenizer:
    """Words, and bytes where there is no word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef", "▁b", "好", "▁ab", "cad"]
    made = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, [], byte_fallback=True))
    made.add_special_tokens(words[:2])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def bert_tokenizer() -> Tokenizer:
    """Words and their parts."""
    words = ["[UNK]", "[CLS]", *"abcdef", "##a", "##cdef", "##b", "##cad", "b", "ab", "好", "##é"]
    made = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}))
    made.add_special_tokens(words[:2])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return made


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, llama_2_tokenizer, bert_tokenizer])
def test_stop_strings_are_found_where_transformers_finds_them(make_tokenizer: Any) -> None:
    made, draw = make_tokenizer(), random.Random(0)  # noqa: S311 - reproducible
    fast_tokenizer, tokens_of_texts = PreTrainedTokenizerFast(tokenizer_object=made), made.encode("ab caddab 好é").ids
    found_count = 0
    for stop_strings in (["a"], ["ab"], [" b", "dd"], ["caddab"], ["好"], ["é", "<s>", "[CLS]"]):
        criteria = StopStringCriteria(fast_tokenizer, stop_strings)
        matcher = StopStringMatcher(made, stop_strings)
        for _ in range(100):
            noise = [draw.choice([*tokens_of_texts, draw.randrange(made.get_vocab_size() + 2)]) for _ in range(9)]
            tokens = noise if draw.random() < 0.5 else [*noise, *tokens_of_texts[: draw.randrange(9)]]
            expected = bool(criteria(torch.tensor([tokens]), None))
            assert matcher.is_at_end(numpy.array(tokens)) == expected, (stop_strings, tokens)
            found_count += expected
    assert 30 < found_count < 570


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"generate": 5}, "expected more than 5 positions"),
        ({"generate": 64, "args": (torch.ones(1),)}, "the inputs are made by the export"),
    ],
)
def test_exports_that_cannot_generate_are_refused(llama: Any, tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        stagepack.export(llama, out=tmp_path / "out.stagepack", **options)
    with pytest.raises(OptionError, match="expected a model of transformers that generates, found Linear"):
        stagepack.export(torch.nn.Linear(1, 1), out=tmp_path / "out.stagepack", generate=64)


class Hasty(LlamaForCausalLM):
    """A model whose attention no mask says: its answer depends on the size of the mask."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        result = super().forward(*args, attention_mask=attention_mask, **kwargs)
        return result if attention_mask is None else type(result)(logits=result.logits * attention_mask.shape[-1])


def test_a_model_that_attends_in_another_way_is_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Hasty attends in a way that its masks do not say"):
        stagepack.export(Hasty(llama.config).eval(), out=tmp_path / "out.stagepack", generate=POSITIONS)


class HastyT5(T5ForConditionalGeneration):
    """A decoder whose answer depends on the size of its mask."""

    def forward(self, *args: Any, decoder_attention_mask: Any = None, **kwargs: Any) -> Any:
        result = super().forward(*args, decoder_attention_mask=decoder_attention_mask, **kwargs)
        result.logits *= 1 if decoder_attention_mask is None else decoder_attention_mask.shape[-1]
        return result


class HeedlessT5(T5ForConditionalGeneration):
    """A decoder that sees the padding of what the encoder reads."""

    def forward(self, *args: Any, attention_mask: Any = None, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        mask = attention_mask if encoder_outputs is None else None
        return super().forward(*args, attention_mask=mask, encoder_outputs=encoder_outputs, **kwargs)


class HastyWhisper(WhisperForConditionalGeneration):
    """A decoder that forgets what earlier calls read."""

    def forward(self, *args: Any, decoder_attention_mask: Any = None, **kwargs: Any) -> Any:
        if decoder_attention_mask is not None:
            decoder_attention_mask = decoder_attention_mask.clone()
            decoder_attention_mask[..., 0] = torch.finfo(decoder_attention_mask.dtype).min
        return super().forward(*args, decoder_attention_mask=decoder_attention_mask, **kwargs)


@pytest.mark.parametrize("model_type", [HastyT5, HeedlessT5, HastyWhisper])
def test_a_model_with_an_encoder_that_attends_in_another_way_is_refused(model_type: Any, tmp_path: Path) -> None:
    model = make_model("whisper" if model_type is HastyWhisper else "t5")
    model.__class__ = model_type
    with pytest.raises(UnsupportedError, match=f"{model_type.__name__} attends in a way that its masks do not say"):
        stagepack.export(model, out=tmp_path / "out.stagepack", generate=POSITIONS, generate_batch=2)


@pytest.mark.parametrize("family", ["t5", "whisper"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_logits_of_a_model_with_an_encoder_are_compared(
    family: str, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "stagepack"):
        made = generating_model(make_model(family), POSITIONS, batch_size)
    [difference] = re.findall(r"differ from those of the model by at most (\S+)", caplog.text)
    assert float(difference) < 1e-5
    # Nothing of the texts is left.
    assert not any(buffer.any() for name, buffer in made.module.named_buffers() if "cache" in name)


SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32}
LOCAL: dict[str, Any] = {
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
    "max_position_embeddings": POSITIONS,
}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        # Its windows are those of the longest text of a batch.
        (lambda: GPTNeoForCausalLM(GPTNeoConfig(**SMALL, **LOCAL, num_layers=2, num_heads=4)), "that its masks do not"),
        (lambda: BloomForCausalLM(BloomConfig(**SMALL, n_layer=1, n_head=4)), "BloomForCausalLM does not run with a"),
        (lambda: rotated("longrope"), "found the rope type 'longrope': choose at most 16 positions"),
        (lambda: rotated("dynamic"), "found the rope type 'dynamic'"),
    ],
)
def test_models_whose_texts_depend_on_each_other_are_refused(make: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=says):
        stagepack.export(make().eval(), out=tmp_path / "out.stagepack", generate=POSITIONS, generate_batch=4)


def neo(window: int) -> Any:
    sizes = LOCAL | {"window_size": window, "max_position_embeddings": 512}
    return GPTNeoForCausalLM(GPTNeoConfig(**SMALL, **sizes, num_layers=2, num_heads=4))


def test_a_window_is_tried_at_its_own_size() -> None:
    """The local attention of GPT-Neo depends on the longest text of a batch; Moshi does not apply the window that it states."""
    for model, window in ((neo(256).eval(), 256), (moshi(100).eval(), 100)):
        says = rf"its masks do not say \(tried .* its window of {window} tokens\): choose at most {window} positions"
        with pytest.raises(UnsupportedError, match=says):
            generating_model(model, 400, 4)
        generating_model(model, window, 4)
    model = moshi(9000)
    model.config.max_position_embeddings = 9999
    with pytest.raises(
        UnsupportedError, match=r"a window of up to 8192 tokens, .*, found 9000 in MoshiForCausalLM: choose"
    ):
        generating_model(model, 9999, 4)


def test_a_window_that_is_applied_is_exported(caplog: pytest.LogCaptureFixture) -> None:
    config = MistralConfig(
        **SMALL, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=100
    )
    drawn = torch.get_rng_state()
    model = MistralForCausalLM(config).eval()
    state = torch.get_rng_state()
    assert not torch.equal(drawn, state)
    with caplog.at_level("INFO", "stagepack"):
        generating_model(model, 300, 4)
    assert torch.equal(torch.get_rng_state(), state)
    differences = re.findall(r"differ from those of the model by at most (\S+)", caplog.text)
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-4


def moshi(window: int) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    return MoshiForCausalLM(MoshiConfig(**SMALL, **sizes, sliding_window=window, max_position_embeddings=512))


def rotated(rope_type: str) -> Any:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0} | (factors if rope_type == "longrope" else {})
    sizes = {"layers": 1, "hidden": 32, "intermediate": 32, "heads": 2, "kv_heads": 2, "vocab_size": 99}
    return benchmark_models.llama(**sizes, rope_parameters=rope)


def test_layers_of_another_kind_are_refused(llama: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(llama.config)
    config.layer_types = ["chunked_attention"]
    with pytest.raises(UnsupportedError, match="expected layers of full or sliding attention, found chunked_attention"):
        stagepack.export(LlamaForCausalLM(config).eval(), out=tmp_path / "out.stagepack", generate=POSITIONS)


def test_texts_move_between_rows(llama: Any, tmp_path: Path) -> None:
    """Two texts begin one after the other, in the first row; then the first one of them ends."""
    bundle = stagepack.export(llama, out=tmp_path / "llama.stagepack", stages=2, generate=POSITIONS, generate_batch=3)
    facts, pipe = decoder_facts(bundle.entry_point), stagepack.load(bundle)
    assert facts is not None
    first, second, third = ([7, 8, 9, 10], [3, 2], [50, 51])
    # The new tokens and the lengths by row, the moves (the row, its length, and where it goes), and the texts by row.
    calls: list[tuple[list[list[int]], list[int], list[tuple[int, int, int]], list[list[int]]]] = [
        ([first], [0], [], [first]),
        # Several tokens, in a call of several rows; the first text only keeps its place.
        ([second, []], [0, 4], [(0, 4, 1)], [second, first]),
        ([[5], [6]], [2, 4], [], [[*second, 5], [*first, 6]]),
        ([third], [0], [(0, 3, 2)], [third]),
        # Texts 0 and 2 change places.
        ([[11], [12], [13]], [3, 5, 2], [(2, 3, 0), (0, 2, 2)], [[*second, 5, 11], [*first, 6, 12], [*third, 13]]),
        # The text in row 0 has ended.
        ([[14], [15]], [3, 6], [(2, 3, 0)], [[*third, 13, 14], [*first, 6, 12, 15]]),
    ]
    for new_tokens, lengths, moves, texts in calls:
        moved = [numpy.array([[row, slot, place, slot] for slot in range(length)]) for row, length, place in moves]
        inputs = row_inputs(facts, [numpy.array(tokens) for tokens in new_tokens], lengths, moved)
        with torch.no_grad():
            logits = pipe(**{name: torch.from_numpy(array) for name, array in inputs.items()})
            for row, text in enumerate(texts):
                if new_tokens[row]:
                    expected = llama(torch.tensor([text])).logits[0, -1]
                    torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_a_cache_that_is_too_small_is_named() -> None:
    facts = DecoderFacts(max_positions=8, logits=None, takes_encoder=False, encoder_positions=None)  # type: ignore[arg-type]
    tokens = numpy.ones((1, 5), "int64")
    TokenLoop(facts, GenerationSettings(max_new_tokens=4), tokens)
    with pytest.raises(InputError, match=r"up to 9 tokens in all \(the cache has 8 positions\), found 5 tokens"):
        TokenLoop(facts, GenerationSettings(max_new_tokens=5), tokens)


def test_without_a_length_20_tokens_are_new_as_in_transformers(llama: Any) -> None:
    mask = torch.ones(2, 30, dtype=torch.int64)
    tokens = torch.randint(1, 99, (2, 30), generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="model-agnostic default"):
        expected = llama.generate(tokens, attention_mask=mask, do_sample=False, eos_token_id=[], pad_token_id=0)
    generated, _ = run_loop(llama, tokens, mask, GenerationSettings())
    assert generated.shape == (2, 50)
    assert torch.equal(generated, expected)
    facts = DecoderFacts(max_positions=32, logits=None, takes_encoder=False, encoder_positions=None)  # type: ignore[arg-type]
    assert TokenLoop(facts, GenerationSettings(), tokens.numpy())._last_length == 32
    says = r"max_length: expected more than the 30 tokens to begin with, found 20: pass max_new_tokens"
    with pytest.raises(InputError, match=says):
        TokenLoop(facts, GenerationSettings(max_length=20), tokens.numpy())


@pytest.mark.parametrize("settings", [{"top_k": "3"}, {"num_beams": 3}, {"eos_token_id": ["a"]}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"settings? "):
        GenerationSettings().override(settings)


@pytest.mark.parametrize(
    ("setting_name", "wrong_values", "expected"),
    [
        ("temperature", (0.0, -1.0, math.nan), "more than 0 (do_sample=False takes the likeliest token)"),
        ("top_k", (-1,), "0 (draw among all tokens) or more"),
        ("top_p", (-0.1, 1.5, math.nan), "0 to 1"),
        ("min_p", (-0.1, 1.5, math.nan), "0 to 1"),
        ("repetition_penalty", (0.0, -2.0, math.nan), "more than 0"),
        ("max_new_tokens", (0, -1), "1 or more"),
        ("presence_penalty", (-2.1, 3.0, math.nan), "-2 to 2"),
        ("frequency_penalty", (-2.1, 3.0, math.nan), "-2 to 2"),
        ("num_beams", (0, 4), "1 (the settings of beam search are not supported)"),
    ],
)
def test_settings_out_of_range_are_refused(setting_name: str, wrong_values: tuple[float, ...], expected: str) -> None:
    for value in wrong_values:
        says = f"{setting_name}: expected {expected}, found {value}"
        with pytest.raises(InputError, match=f"^{re.escape(says)}$"):
            GenerationSettings().override({"do_sample": True, setting_name: value})
        # Settings of a file are checked with the ones of a call, which may replace them.
        stored = GenerationSettings().replace({"do_sample": True, setting_name: value})
        with pytest.raises(InputError, match=f"^{re.escape(says)} in generation_config.json of the bundle$"):
            stored.override({"seed": 1})
        assert stored.override({setting_name: 1}).do_sample


def test_the_ends_of_ranges_are_taken_and_unused_settings_too() -> None:
    ends = {"do_sample": True, "top_k": 0, "top_p": 0.0, "min_p": 1.0, "max_new_tokens": 1}
    GenerationSettings().override(ends)
    GenerationSettings().override({"top_p": 1.0, "min_p": 0.0, "do_sample": True})
    # As in transformers.
    GenerationSettings().override({"do_sample": False, "temperature": 0.0, "top_k": -1, "top_p": 2.0, "min_p": -1.0})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"no_repeat_ngram_size": 3, "forced_bos_token_id": 0, "top_k": 3},
            "forced_bos_token_id, no_repeat_ngram_size",
        ),
        ({"sequence_bias": [[[3], 1.0]], "bad_words_ids": [[1]]}, "bad_words_ids, sequence_bias"),
        ({"min_length": 0, "typical_p": 1.0, "sequence_bias": {}, "guidance_scale": None, "epsilon_cutoff": 0.0}, None),
        ({"transformers_version": "5", "bos_token_id": 1, "use_cache": True, "output_scores": False}, None),
    ],
)
def test_settings_that_are_not_supported_are_named_once(
    settings: dict[str, Any], named: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = stagepack.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), out=tmp_path / "linear.stagepack")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    stagepack.add_assets(bundle.path, [tmp_path / "generation_config.json"])
    for opened in (stagepack.open(bundle.path), stagepack.open(bundle.path)):
        caplog.clear()
        with caplog.at_level("WARNING", "stagepack"):
            read_settings(opened)
            read_settings(opened)
        says = f"generation_config.json: {named} is not supported: tokens differ from those of transformers"
        assert caplog.messages == ([f"{opened.location}: {says}"] if named else [])
