"""Models of every kind, also with 16 requests of changing sizes in flight, answer as in one process: values, containers and strides."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.distributed import PipelineSequence
from tests.distributed.bundles import check_case, check_in_flight, check_in_turn, in_processes
from tests.zoo.architectures.encoders import minilm_encoder_folder
from tests.zoo.case import Case
from tests.zoo.cases import CASES, named
from tests.zoo.test_zoo import name_of
from tools.benchmark_models import llama

REQUESTS = 16
NEW_TOKENS = 24
MODELS = named(
    "decoders-llama",
    "decoders-llama-tied",
    "encoder-decoders-t5",
    "operators-custom-operators",
    "operators-custom-operator-that-writes",
    "shapes-nonzero",
    "shapes-sizes-from-data",
    "values-u-net",
    "weights-tied-at-both-ends",
)
IN_CI = ("values-u-net", 3)
# Models that are called in turn: one of each kind; `make test-zoo` runs all.
QUICK = named(
    "aliasing-inputs-written",
    "decoders-llama-tied",
    "encoder-decoders-t5",
    "operators-custom-operators",
    "shapes-nonzero",
    "shapes-sizes-from-data",
    "state-static-cache-decoder",
    "values-strided-values-cross",
    "values-u-net",
    "weights-scalars-and-empty-tensors",
)
# Their random operators draw from generators of their own in each process.
DRAWING = {
    "operators-dropout-that-draws",
    "operators-draws-of-every-kind",
    "operators-draws-in-two-branches",
    "operators-layers-with-dropout-in-train-mode",
    "operators-one-draw-used-in-every-layer",
    "regions-cond-that-draws",
}


def run_param(case: Case, processes: int, *, is_quick: bool) -> Any:
    return pytest.param(case, processes, marks=() if is_quick else pytest.mark.slow, id=f"{name_of(case)}-{processes}")


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        run_param(case, 2 + number % 3, is_quick=case in QUICK)
        for number, case in enumerate(case for case in CASES if case.name not in DRAWING)
    ],
)
def test_processes_answer_as_one(case: Case, processes: int, tmp_path: Path) -> None:
    check_case(case, tmp_path, processes, [None, 3, None, 3], check_in_turn)


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        run_param(case, processes, is_quick=(case.name, processes) == IN_CI)
        for case in MODELS
        for processes in (2, 3, 4)
    ],
)
def test_requests_in_flight(case: Case, processes: int, tmp_path: Path) -> None:
    growths = [number % 5 if number % 3 else None for number in range(REQUESTS)]
    check_case(case, tmp_path, processes, growths, check_in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_published_weights(processes: int, tmp_path: Path) -> None:
    bundle = stagepack.export(minilm_encoder_folder(), out=tmp_path / "minilm.stagepack", stages=processes)
    generator = torch.Generator().manual_seed(0)
    calls = []
    for number in range(REQUESTS):
        ids = torch.randint(1, 3000, (1 + number % 3, 4 + 29 * number % 50), generator=generator)
        calls.append(Inputs(kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
    check_in_flight(bundle, calls)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_sequences_write_the_greedy_tokens_of_transformers(processes: int, tmp_path: Path) -> None:
    model = llama(layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=512)
    prompts = [torch.randint(3, 500, (1, length)) for length in (3, 1, 7, 4)]
    expected = [
        model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        for prompt in prompts
    ]
    cache = {"batch_size": 1, "max_cache_len": 48, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    example = {"input_ids": prompts[0][:, :1], "cache_position": torch.tensor([0])}
    bundle = stagepack.export(
        TorchExportableModuleWithStaticCache(model), kwargs=example, out=tmp_path / "m.stagepack", stages=processes
    )
    assert all(any("_cache_" in name for name in stage.state) for stage in bundle.stages)
    with in_processes(bundle) as pipeline, ExitStack() as sequences:
        texts = [GreedyText(sequences.enter_context(pipeline.sequence()), prompt) for prompt in prompts]
        while unfinished := [text for text in texts if text.tokens.shape[1] < text.final_length]:
            for text in unfinished:
                text.begin_step()
            for text in unfinished:  # all of them are in flight
                text.end_step()
        assert all(torch.equal(text.tokens, tokens) for text, tokens in zip(texts, expected, strict=True))


class GreedyText:
    """A text that grows by its most likely token, one a call."""

    def __init__(self, sequence: PipelineSequence, prompt: torch.Tensor) -> None:
        self.tokens = prompt
        self.final_length = prompt.shape[1] + NEW_TOKENS
        self._sequence = sequence
        self._position = 0

    def begin_step(self) -> None:
        self._logits = self._sequence.submit(
            input_ids=self.tokens[:, self._position : self._position + 1], cache_position=torch.tensor([self._position])
        )

    def end_step(self) -> None:
        logits = self._logits.result()
        self._position += 1
        if self._position == self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
