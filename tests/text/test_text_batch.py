"""Texts that begin and end while others go on, in the rows of one cache, have the tokens of texts that are alone."""

import contextlib
import dataclasses
import random
import shutil
from typing import Any

import numpy
import pytest

import stagepack
from stagepack.errors import StageFailedError
from stagepack_loaders.decoders import DecoderFacts, decoder_facts
from stagepack_text.loop import text_batch
from stagepack_text.loop.text_batch import BatchCall, BatchedText, TextBatch
from stagepack_text.loop.token_loop import TokenLoop
from stagepack_text.sampling import logits_as_floats
from stagepack_text.settings import GenerationSettings
from tests.text.generating_families import (
    NOT_FINITE,
    POSITIONS,
    VOCABULARY,
    fragile_bundle,
    fragile_onnx_bundle,
    qwen_bundle,
)

ROWS = 4


@pytest.fixture(scope="module")
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path, runtime = qwen_bundle(tmp_path_factory), getattr(request, "param", "torch")
    if runtime == "onnxruntime":
        path = shutil.copytree(path, tmp_path_factory.mktemp("batch") / "m.stagepack")
        stagepack.add_onnx(path)
    return stagepack.load(path, runtime=runtime)


@pytest.fixture
def facts(pipeline: Any) -> DecoderFacts:
    facts = decoder_facts(pipeline.bundle.entry_point)
    assert facts is not None
    return facts


class Texts:
    """Texts of drawn lengths, greedy and sampled, with the tokens that each has alone."""

    def __init__(self, pipeline: Any, facts: DecoderFacts, seed: int) -> None:
        self.pipeline, self.facts = pipeline, facts
        self.random = random.Random(seed)  # noqa: S311 - of a test
        self.expected: dict[BatchedText, list[int]] = {}
        self.sequence: Any = None

    def begin(self, batch: TextBatch[BatchedText]) -> None:
        length = self.random.choice((1, 2, 3, 9, 30))
        prompt = numpy.array([[self.random.randrange(2, VOCABULARY) for _ in range(length)]])
        options = {"max_new_tokens": self.random.randint(1, 20), "seed": self.random.randrange(99), "eos_token_id": [1]}
        options |= self.random.choice(({}, {"do_sample": True, "temperature": 0.9}))
        loop = TokenLoop(self.facts, GenerationSettings().override(options), prompt)
        text = BatchedText(loop)
        batch.add(text)
        self.expected[text] = self.pipeline.generate(prompt, **options)[0].tolist()

    def step(self, batch: TextBatch[BatchedText]) -> bool:
        """Make a call of the batch; check the texts that end."""
        call = batch.next_call()
        if call is None:
            return False
        assert len(call.inputs["input_ids"]) <= ROWS
        logits = self.sequence(**call.inputs)
        for position, text in call.texts.items():
            text.loop.take(logits_as_floats(logits[position : position + 1], self.facts.logits))
            if text.loop.is_finished:
                assert text.loop.tokens[0].tolist() == self.expected.pop(text)
        return True


@pytest.mark.parametrize(
    ("pipeline", "seed"),
    [
        pytest.param(runtime, seed, marks=() if (runtime, seed) == ("torch", 0) else pytest.mark.slow)
        for runtime in ("torch", "onnxruntime")
        for seed in range(4)
    ],
    indirect=["pipeline"],
)
def test_drawn_texts_are_those_of_each_alone(
    pipeline: Any, facts: DecoderFacts, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read in parts while others go on; some texts are removed."""
    monkeypatch.setattr(text_batch, "_CHUNK_TOKENS", 8)
    texts, batch = Texts(pipeline, facts, seed), TextBatch[BatchedText](facts, ROWS)
    with pipeline.inference(), pipeline.sequence() as texts.sequence:
        for _ in range(60):
            for _ in range(texts.random.choice((0, 0, 0, 1, 1, 3))):
                texts.begin(batch)
            if texts.random.random() < 0.1:  # as after a call that failed
                failed = batch.begin_again()
                if failed is not None:
                    del texts.expected[failed]
            if texts.expected and texts.random.random() < 0.1:
                removed = texts.random.choice(list(texts.expected))
                batch.remove(removed)
                del texts.expected[removed]
            texts.step(batch)
        while texts.step(batch):
            pass
    assert not texts.expected
    assert (len(batch), batch.held_tokens) == (0, 0)


@pytest.fixture(scope="module")
def fragile_pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "onnxruntime":
        return stagepack.load(fragile_onnx_bundle(tmp_path_factory), runtime="onnxruntime")
    return stagepack.load(fragile_bundle(tmp_path_factory, "qwen3"))


@pytest.mark.parametrize(
    ("fragile_pipeline", "has_zeros", "seed"),
    [
        pytest.param(runtime, has_zeros, seed, marks=() if is_quick else pytest.mark.slow)
        for runtime in ("torch", "onnxruntime")
        for has_zeros in (True, False)  # of bundles from before
        for seed in range(4)
        for is_quick in [seed == 0 and (has_zeros or runtime == "torch")]
    ],
    indirect=["fragile_pipeline"],
)
def test_texts_that_are_not_finite_leave_nothing_behind(fragile_pipeline: Any, seed: int, has_zeros: bool) -> None:
    facts = decoder_facts(fragile_pipeline.bundle.entry_point)
    assert facts is not None
    assert facts.zero_slot == POSITIONS + 1
    facts = facts if has_zeros else dataclasses.replace(facts, zero_slot=None)
    texts, batch = Texts(fragile_pipeline, facts, seed), TextBatch[BatchedText](facts, ROWS)
    failed_count = 0

    def run_sequence() -> None:
        nonlocal failed_count
        with fragile_pipeline.inference(), fragile_pipeline.sequence() as texts.sequence:
            while (call := batch.next_call()) is not None:
                logits = logits_as_floats(texts.sequence(**call.inputs), facts.logits)
                for position, text in call.texts.items():
                    try:
                        text.loop.take(logits[position : position + 1])
                    except StageFailedError:
                        assert text not in texts.expected
                        batch.remove(text)
                        failed_count += 1
                    else:
                        if text.loop.is_finished:
                            assert text.loop.tokens[0].tolist() == texts.expected.pop(text)
                if begun and texts.random.random() < 0.5:
                    begun.pop()()

    def begin_drawn() -> None:
        with contextlib.suppress(
            StageFailedError
        ):  # it may choose the token: then it fails alone as it does beside others
            texts.begin(batch)

    def begin_fragile() -> None:
        length = texts.random.choice((1, 3, 20, 40))
        batch.add(
            BatchedText(TokenLoop(facts, GenerationSettings(max_new_tokens=9), numpy.full((1, length), NOT_FINITE)))
        )

    begun = [texts.random.choice((begin_fragile, begin_drawn)) for _ in range(60)]
    while begun or len(batch):
        if begun:
            begun.pop()()
        run_sequence()
    assert not texts.expected
    assert failed_count > 10


def add_prompt(batch: TextBatch[BatchedText], facts: DecoderFacts, length: int) -> BatchedText:
    text = BatchedText(TokenLoop(facts, GenerationSettings(max_new_tokens=5), numpy.full((1, length), 7)))
    batch.add(text)
    return text


def next_call(batch: TextBatch[BatchedText]) -> BatchCall[BatchedText]:
    """The next call, whose texts get a token."""
    call = batch.next_call()
    assert call is not None
    for text in call.texts.values():
        text.loop.take(numpy.zeros((1, VOCABULARY), numpy.float32))
    return call


def test_others_go_on_while_a_long_prompt_is_read(facts: DecoderFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_batch, "_CHUNK_TOKENS", 4)
    batch = TextBatch[BatchedText](facts, ROWS)
    short = add_prompt(batch, facts, 3)
    calls = [next_call(batch)]
    add_prompt(batch, facts, 10)
    calls += [next_call(batch) for _ in range(5)]
    # The long prompt is in the first row, where the other text has begun.
    assert calls[1].inputs["cache_moves"].tolist() == [[0, slot, 1, slot] for slot in range(3)]
    expected = [((1, 3), True), ((1, 4), False), ((2, 1), True), ((1, 4), False), ((2, 1), True), ((1, 2), False)]
    assert [(call.inputs["input_ids"].shape, short in call.texts.values()) for call in calls] == expected


@pytest.mark.parametrize(("is_alone", "lengths"), [(True, [40, 1, 1]), (False, [20, 20, 1])])
def test_prompts_are_read_in_more_parts_beside_other_batches(
    facts: DecoderFacts, monkeypatch: pytest.MonkeyPatch, is_alone: bool, lengths: list[int]
) -> None:
    monkeypatch.setattr(text_batch, "_OVERLAPPED_TOKENS", 40)
    batch = TextBatch[BatchedText](facts, 2, is_alone=is_alone)
    for _ in range(2):
        add_prompt(batch, facts, 40)
    assert [next_call(batch).inputs["input_ids"].shape[1] for _ in lengths] == lengths


def test_texts_begin_in_their_order_when_a_row_is_free(facts: DecoderFacts) -> None:
    batch = TextBatch[BatchedText](facts, 2)
    texts = [add_prompt(batch, facts, length) for length in (2, 2, 3, 4)]
    assert len(batch) == 4
    assert set(next_call(batch).texts.values()) == set(texts[:2])
    assert batch.held_tokens == 4
    batch.remove(texts[0])
    call = next_call(batch)
    assert list(call.texts.values()) == [texts[2]]
    # The other text stays in row 1.
    assert call.inputs["cache_moves"].tolist() == []
    assert call.inputs["cache_position"].tolist() == [[0, 1, 2]]


def test_a_call_that_fails_is_tried_with_fewer_texts_until_one_is_alone(facts: DecoderFacts) -> None:
    batch = TextBatch[BatchedText](facts, 4)
    texts = [add_prompt(batch, facts, 3) for _ in range(4)]
    sizes, ended = [], None
    while ended is None:  # calls with text 2 fail
        call = batch.next_call()
        assert call is not None
        sizes.append(len(call.texts))
        if texts[2] in call.texts.values():
            ended = batch.begin_again()
            continue
        for text in call.texts.values():
            text.loop.take(numpy.zeros((1, VOCABULARY), numpy.float32))
    assert ended is texts[2]
    assert sizes[0] == 4
    assert sizes[-1] == 1
    while next_call_or_none(batch):
        pass
    assert [text.loop.tokens.shape[1] for text in texts] == [8, 8, 3, 8]
    assert batch.most_texts == 4


def next_call_or_none(batch: TextBatch[BatchedText]) -> bool:
    call = batch.next_call()
    for text in call.texts.values() if call is not None else ():
        text.loop.take(numpy.zeros((1, VOCABULARY), numpy.float32))
    return call is not None
