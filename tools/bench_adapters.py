"""Adapters over one copy of the weights: a Llama that generates, in two stages, with adapters of all its linear layers.

All sides of a ratio take turns in one run. The parts:

- ``batch``: steps of eight texts with eight adapters, against the same texts with one adapter, and with none.
- ``switch``: what a request of one text costs more that has another adapter than the one before, against a load of the merged bundle; and
  the load of all adapters beside the bundle. In processor time: the switch is less than what a loaded machine adds to a request.

Usage: ``python -m tools.bench_adapters [PART ...] [--quick]``, or all parts without a name. ``--quick`` tries whether all of it runs.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import stagepack
from stagepack_loaders.local_pipeline import Pipeline
from tests.adapters.lora import write_lora
from tools.benchmark_models import llama
from tools.benchmark_results import ResultTable, benchmark_parser, benchmark_results
from tools.measuring import median_ratio, medians, seconds_in_turns

VOCABULARY: Final = 4096
COUNT: Final = 8  # adapters, and texts of a batch
RANK: Final = 8
PROMPT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts share.

    Attributes:
        adapters: the folders of the adapters.
    """

    folder: Path
    table: ResultTable
    adapters: Sequence[Path]
    rounds: int
    new_tokens: int

    @property
    def bundle(self) -> Path:
        """The bundle of the base."""
        return self.folder / "base.stagepack"


def main() -> None:
    """Measure what the command line names."""
    parts: dict[str, Callable[[Bench], None]] = {"batch": measure_batch, "switch": measure_switch}
    parser = benchmark_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--quick", action="store_true", help="one round of a few tokens, a model of 2 layers")
    options = parser.parse_args()
    layers, rounds, new_tokens = (2, 1, 4) if options.quick else (6, 9, 12)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = make_adapters(folder, layers)
        title = f"Adapters of rank {RANK} of all linear layers, Llama of {layers} layers, hidden size 1024, median of {rounds}"
        table = results.table(title, "what", "first, ms", "second, ms", "first over second", "bar", "first and second")
        bench = Bench(folder, table, adapters, rounds, new_tokens)
        for part_name in options.parts or parts:
            parts[part_name](bench)


def make_adapters(folder: Path, layers: int) -> list[Path]:
    """Export the model, and write adapters of it."""
    model = llama(
        layers=layers,
        hidden=1024,
        intermediate=2816,
        heads=16,
        kv_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )
    model.generation_config.eos_token_id = None
    stagepack.export(model, out=folder / "base.stagepack", stages=2, generate=64, generate_batch=COUNT)
    linear = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapters = []
    for number in range(COUNT):
        lora = write_lora(model, folder / f"lora-{number}", dict.fromkeys(linear, RANK), seed=number)
        adapter = stagepack.write_adapter(folder / "base.stagepack", lora, out=folder / f"adapter-{number}")
        adapters.append(adapter.path)
    return adapters


def generate(pipeline: Pipeline, new_tokens: int, adapter: Any, count: int = COUNT) -> torch.Tensor:
    """The tokens of a batch of texts."""
    prompts = torch.randint(0, VOCABULARY, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    found: torch.Tensor = pipeline.generate(prompts, max_new_tokens=new_tokens, adapter=adapter)
    return found


def measure_batch(bench: Bench) -> None:
    """Tokens of eight texts, each with its own adapter."""
    pipeline = stagepack.load(bench.bundle, adapters=list(bench.adapters))
    names = list(pipeline.adapters)
    sides: dict[str, Callable[[], object]] = {
        "one adapter for all": lambda: generate(pipeline, bench.new_tokens, names[0]),
        "an adapter for each text": lambda: generate(pipeline, bench.new_tokens, names),
        "no adapter": lambda: generate(pipeline, bench.new_tokens, None),
    }
    seconds = seconds_in_turns(sides, bench.rounds, warm_rounds=1)
    one, each, none = (seconds[side] for side in sides)
    for what, first, second, bar, shown in (
        ("tokens per second of eight adapters", one, each, "at least 0.8", "one adapter for all, one for each text"),
        ("tokens per second of one adapter", none, one, "", "no adapter, one adapter for all"),
    ):
        cells = (1e3 * statistics.median(first), 1e3 * statistics.median(second), median_ratio(first, second))
        bench.table.add(f"{what}, {COUNT} x {bench.new_tokens} tokens", *cells, bar, shown)


def measure_switch(bench: Bench) -> None:
    """A request with another adapter than the one before, and the loads that it takes the place of."""
    merged = stagepack.merge_adapter(bench.bundle, bench.adapters[0], out=bench.folder / "merged.stagepack")
    pipeline = stagepack.load(bench.bundle, adapters=list(bench.adapters))
    others = itertools.cycle(pipeline.adapters)
    sides: dict[str, Callable[[], object]] = {
        "same adapter": lambda: generate(pipeline, 1, pipeline.adapters[0], 1),
        "another adapter": lambda: generate(pipeline, 1, next(others), 1),
        "load of the merged bundle": lambda: stagepack.load(merged),
        "load of the bundle": lambda: stagepack.load(bench.bundle),
        "load with eight adapters": lambda: stagepack.load(bench.bundle, adapters=list(bench.adapters)),
    }
    seconds = seconds_in_turns(sides, 6 * bench.rounds, warm_rounds=2, clock=time.process_time)
    middle = medians(seconds)
    differences = [
        other - same for other, same in zip(seconds["another adapter"], seconds["same adapter"], strict=True)
    ]
    switch = max(0.0, statistics.median(differences))
    load = middle["load of the merged bundle"]
    shown = "processor time: another adapter less the same one, load of the merged bundle"
    bench.table.add("switch of the adapter", 1e3 * switch, 1e3 * load, switch / load, "at most 0.02", shown)
    plain, adapted = middle["load of the bundle"], middle["load with eight adapters"]
    ratio = median_ratio(seconds["load with eight adapters"], seconds["load of the bundle"])
    shown = "processor time: with eight adapters, without"
    bench.table.add("load", 1e3 * adapted, 1e3 * plain, ratio, "", shown)


if __name__ == "__main__":
    main()
