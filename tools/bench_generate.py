"""Generation over two stages in processes of one thread each: eight generations at once against one after another.

While one generation waits for its next token, others keep the stages busy: at most twice as fast, with two equal stages. Beside them
``generate`` of transformers in one process of one thread. All sides take turns in one run, and give the same tokens.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import stagepack
from tools.benchmark_models import llama
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import median_ratio, medians, seconds_in_turns

GENERATIONS = 8
PROMPT_LENGTH = 32
NEW_TOKENS = 32
POSITIONS = PROMPT_LENGTH + NEW_TOKENS
ROUNDS = 5


def main() -> None:
    """Measure, and print the figures."""
    options = benchmark_parser(__doc__).parse_args()
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
        # Its layers take most of the time.
        model = llama(
            layers=8,
            hidden=512,
            intermediate=1408,
            heads=8,
            kv_heads=8,
            vocab_size=4096,
            max_position_embeddings=POSITIONS,
        )
        for batch in (1, 4):
            bundle_path = Path(folder) / f"{batch}.stagepack"
            stagepack.export(model, out=bundle_path, stages=2, generate=POSITIONS, generate_batch=batch)
            seconds = measure(model, bundle_path, batch)
            at_once, in_turn, theirs = medians(seconds).values()
            ratios = {side: median_ratio(seconds[side], seconds["at once"]) for side in ("in turn", "transformers")}
            table.add(str(batch), at_once, in_turn, ratios["in turn"], theirs, ratios["transformers"])


def measure(model: Any, bundle_path: Path, batch: int) -> dict[str, list[float]]:
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

        sides = {"at once": at_once, "in turn": in_turn, "transformers": by_transformers}
        first, *others = [torch.cat(side()) for side in sides.values()]
        if not all(torch.equal(other, first) for other in others):
            raise AssertionError("expected the same tokens of all sides")
        return seconds_in_turns(sides, ROUNDS)


if __name__ == "__main__":
    main()
