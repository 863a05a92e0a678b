"""Compiling a Llama-like model: whole with ``torch.compile``, by regions, and ahead of time. Run with ``python -m tools.bench_compile``.

Every side is measured in this run, in processes of its own with empty caches; the times of steady calls are medians of calls in turn.
First call: from a loaded model to the first answer. Ready: from the folder on disk to a pipeline that can be called.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.capture.programs import capture_module
from stagepack.exporter import export_capture
from stagepack.partition.cut_options import CutOptions
from stagepack_loaders.torch.compilation import compile_ahead
from tools.benchmark_models import llama, token_inputs
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import medians, run_python, seconds_in_turns, seconds_of

LAYERS = {"cpu": (4, 24), "cuda": (4, 12)}
HIDDEN = {"cpu": 512, "cuda": 2048}
TINY_LAYERS, TINY_HIDDEN = (2, 3), 128
CALLS = 15


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny tries the measurements")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_MEASURES[options.measure](options.device, options.layers, options.hidden)))
        return
    with benchmark_results(options.json, device=options.device) as results:
        is_tiny = options.size == "tiny"
        layers = TINY_LAYERS if is_tiny else LAYERS[options.device]
        _measure_all(results, options.device, layers, TINY_HIDDEN if is_tiny else HIDDEN[options.device])


def _measure_all(results: BenchmarkResults, device: str, layers: tuple[int, int], hidden: int) -> None:
    """Measure a small and a large model, each in processes of its own."""
    few, many = layers
    short = _in_a_process("regions", device, few, hidden)
    seconds = _in_a_process("regions", device, many, hidden) | _in_a_process("whole", device, many, hidden)
    table = results.table(
        f"Time to the first answer of a Llama-like model, hidden size {hidden}",
        "what is compiled",
        "layers",
        "seconds",
        f"over the {few} layers",
        "of whole",
    )
    table.add("regions, first call", few, short["first"], 1.0, "")
    first_ratios = seconds["first"] / short["first"], seconds["first"] / seconds["whole"]
    table.add("regions, first call", many, seconds["first"], *first_ratios)
    table.add("whole, first call", many, seconds["whole"], "", 1.0)
    table.add(
        "ahead of time, ready to call", many, seconds["ready"], "", f"1/{seconds['whole'] / seconds['ready']:.0f}"
    )
    steady = results.table(f"Steady calls, {many} layers", "what is compiled", "milliseconds", "of whole")
    titles = {"whole": "whole", "by regions": "regions", "compiled ahead": "ahead of time", "eager": "nothing (eager)"}
    for side, title in titles.items():
        steady.add(title, seconds[f"steady {side}"] * 1e3, seconds[f"steady {side}"] / seconds["steady whole"])


def _in_a_process(measure: str, device: str, layers: int, hidden: int) -> dict[str, float]:
    """A measurement in a process of its own, with an empty cache of the compiler that is not used again."""
    arguments = ("--measure", measure, "--device", device, "--layers", str(layers), "--hidden", str(hidden))
    with tempfile.TemporaryDirectory() as cache:
        seconds: dict[str, float] = run_python(
            "-m",
            "tools.bench_compile",
            *arguments,
            TORCHINDUCTOR_CACHE_DIR=cache,
            TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        )
    return seconds


@torch.no_grad()
def _regions(device: str, layers: int, hidden: int) -> dict[str, float]:
    _, ids, bundle = _model(device, layers, hidden)
    pipe = stagepack.load(bundle, [device], compile=True)
    return {"first": seconds_of(lambda: pipe(ids), _wait)}


@torch.no_grad()
def _whole(device: str, layers: int, hidden: int) -> dict[str, float]:
    model, ids, bundle = _model(device, layers, hidden)
    whole = torch.compile(model)
    first_seconds = seconds_of(lambda: whole(ids, use_cache=False), _wait)
    compiled = bundle.parent / "compiled"
    failures = [unit.reason for unit in compile_ahead(bundle, compiled, device) if unit.reason]
    if failures:
        raise SystemExit(f"not compiled ahead of time: {failures}")
    regions = stagepack.load(bundle, [device], compile=True)
    eager = stagepack.load(bundle, [device])
    regions(ids)
    loaded: list[Any] = []
    ready_seconds = seconds_of(lambda: loaded.append(stagepack.load(bundle, [device], compiled=compiled)))
    sides = {
        "steady whole": lambda: whole(ids, use_cache=False),
        "steady by regions": lambda: regions(ids),
        "steady compiled ahead": lambda: loaded[0](ids),
        "steady eager": lambda: eager(ids),
    }
    steady = medians(seconds_in_turns(sides, CALLS, warm_rounds=2, wait=_wait))
    return {"whole": first_seconds, "ready": ready_seconds, **steady}


_MEASURES = {"regions": _regions, "whole": _whole}


def _model(device: str, layers: int, hidden: int) -> tuple[Any, torch.Tensor, Path]:
    """A model with random weights, a batch for it, and its bundle."""
    heads, kv_heads = hidden // 64, hidden // 128
    sizes = {"layers": layers, "hidden": hidden, "intermediate": hidden * 11 // 4, "heads": heads, "kv_heads": kv_heads}
    model = llama(**sizes, vocab_size=1024).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(0, 1024, (4, 128), device=device)
    inputs = token_inputs("input_ids", rows=4, length=128, longest=1024, use_cache=False)
    inputs = replace(inputs, kwargs={**inputs.kwargs, "input_ids": ids})
    out = Path(tempfile.mkdtemp()) / "llama.stagepack"
    export_capture(capture_module(model, inputs), out=out, cut_options=CutOptions(stages=1))
    return model, ids, out


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
