"""Generation over two stages in processes of one thread each: eight generations at once against one after another.

While one generation waits for its next token, others keep the stages busy: at most twice as fast, with two equal stages. Beside them
``generate`` of transformers in one process of one thread. All sides take turns in one run, and give the same tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stagepack
from tools.benchmark_results import add_json_option, benchmark_results

GENERATIONS = 8
PROMPT_LENGTH = 32
NEW_TOKENS = 32
ROUNDS = 5


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        table = results.table(
            f"{GENERATIONS} generations of {NEW_TOKENS} tokens, Llama of 8 layers, median of {ROUNDS}",
            "texts of a generation",
            "at once, s",
            "in turn, s",
            "in turn over at once",
            "transformers, s",
            "transformers over at once",
        )
        model = make_model()
        for batch in (1, 4):
            bundle_path = Path(folder) / f"{batch}.stagepack"
            stagepack.export(
                model, out=bundle_path, stages=2, generate=PROMPT_LENGTH + NEW_TOKENS, generate_batch=batch
            )
            at_once, in_turn, transformers = measure(model, bundle_path, batch)
            speedup = statistics.median(slow / fast for slow, fast in zip(in_turn, at_once, strict=True))
            theirs = statistics.median(slow / fast for slow, fast in zip(transformers, at_once, strict=True))
            medians = [statistics.median(times) for times in (at_once, in_turn, transformers)]
            table.add(str(batch), medians[0], medians[1], speedup, medians[2], theirs)


def make_model() -> Any:
    """A Llama with random weights, whose layers take most of the time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=PROMPT_LENGTH + NEW_TOKENS,
    )
    return LlamaForCausalLM(config).eval()


def measure(model: Any, bundle_path: Path, batch: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each round: at once, one after another, and by transformers one after another."""
    prompts = [torch.randint(0, 4096, (batch, PROMPT_LENGTH)) for _ in range(GENERATIONS)]
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
    with stagepack.load(bundle_path, processes=2) as pipeline, ThreadPoolExecutor(GENERATIONS) as threads:

        def at_once() -> list[torch.Tensor]:
            return list(threads.map(lambda prompt: pipeline.generate(prompt, **settings), prompts))

        def in_turn() -> list[torch.Tensor]:
            return [pipeline.generate(prompt, **settings) for prompt in prompts]

        def by_transformers() -> list[torch.Tensor]:
            mask = torch.ones_like(prompts[0])
            return [
                model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
                for prompt in prompts
            ]

        sides = (at_once, in_turn, by_transformers)
        answers = [side() for side in sides]
        if not all(torch.equal(torch.cat(answer), torch.cat(answers[0])) for answer in answers):
            raise AssertionError("expected the same tokens of all sides")
        times = [[seconds_of(side) for side in sides] for _ in range(ROUNDS)]
    ours, turns, theirs = (list(column) for column in zip(*times, strict=True))
    return ours, turns, theirs


def seconds_of(action: Callable[[], object]) -> float:
    """The time that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
