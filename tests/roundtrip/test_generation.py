"""Decoders with a static cache, cut in stages, write what transformers writes: in one process, stage by stage, and in processes."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import stagepack
from stagepack.format.reader import Bundle
from tests.distributed.bundles import in_processes
from tests.zoo.apart import load_apart
from tools.benchmark_models import llama

NEW_TOKENS = 32
# The layers that start a stage, by the number of stages.
SPLITS = {2: [1], 3: [1, 3], 4: [1, 2, 3]}


class GreedyText:
    """A text that grows by its most likely token, one a call."""

    def __init__(self, call: Callable[..., Any], prompt: torch.Tensor) -> None:
        self.tokens = prompt
        self.final_length = prompt.shape[1] + NEW_TOKENS
        self._call = call
        self._position = 0

    def begin_step(self) -> None:
        self._logits = self._call(
            input_ids=self.tokens[:, self._position : self._position + 1], cache_position=torch.tensor([self._position])
        )

    def end_step(self) -> None:
        logits = self._logits.result() if isinstance(self._logits, Future) else self._logits
        self._position += 1
        if self._position == self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)


def write(texts: list[GreedyText]) -> list[torch.Tensor]:
    """The tokens of texts; in processes, the calls of all of them are in flight."""
    while unfinished := [text for text in texts if text.tokens.shape[1] < text.final_length]:
        for text in unfinished:
            text.begin_step()
        for text in unfinished:
            text.end_step()
    return [text.tokens for text in texts]


@contextmanager
def in_one_process(bundle: Bundle) -> Iterator[Any]:
    yield stagepack.load(bundle)


@contextmanager
def stage_by_stage(bundle: Bundle) -> Iterator[Any]:
    yield load_apart(bundle, types=(), allow_ops=())


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder in stages, and the texts of its model."""

    bundle: Bundle
    prompts: list[torch.Tensor]
    texts: list[torch.Tensor]


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder in as many stages as a test asks for."""
    torch.manual_seed(0)
    model = llama(layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=512)
    prompts = [torch.randint(3, 500, (1, length)) for length in (3, 1, 7, 4)]
    greedy: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [model.generate(prompt, **greedy) for prompt in prompts]
    cache = {"batch_size": 1, "max_cache_len": 48, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    bundle = stagepack.export(
        TorchExportableModuleWithStaticCache(model),
        kwargs={"input_ids": prompts[0][:, :1], "cache_position": torch.tensor([0])},
        out=tmp_path_factory.mktemp("decoder") / "decoder.stagepack",
        split_at=[f"model.model.layers.{layer}" for layer in SPLITS[request.param]],
    )
    return Decoder(bundle, prompts, texts)


@pytest.mark.parametrize(
    ("road", "decoder"),
    [
        (in_one_process, 3),
        (stage_by_stage, 3),
        *(pytest.param(in_processes, stages, marks=[pytest.mark.slow, pytest.mark.process]) for stages in (2, 3, 4)),
    ],
    indirect=["decoder"],
)
def test_greedy_tokens_are_those_of_transformers(road: Any, decoder: Decoder) -> None:
    caches = [sum("_cache_" in name for name in stage.state) for stage in decoder.bundle.stages]
    starts = SPLITS[len(decoder.bundle.stages)]
    assert caches == [2 * (end - start) for start, end in itertools.pairwise([0, *starts, 4])]
    with road(decoder.bundle) as pipe, ExitStack() as sequences:
        texts = [GreedyText(sequences.enter_context(pipe.sequence()).submit, prompt) for prompt in decoder.prompts]
        assert all(map(torch.equal, write(texts), decoder.texts))
        for prompt, tokens in zip(decoder.prompts, decoder.texts, strict=True):
            pipe.reset_state()
            [alone] = write([GreedyText(pipe, prompt)])
            assert torch.equal(alone, tokens)
