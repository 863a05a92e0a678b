"""Compiling a Llama-like model: whole with ``torch.compile``, by regions, and ahead of time. Run with ``python -m tools.bench_compile``.

Every side is measured in this run, in processes of its own with empty caches; the times of steady calls are medians of calls in turn.
First call: from a loaded model to the first answer. Ready: from the folder on disk to a pipeline that can be called.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_module
from stagepack.exporter import export_capture
from stagepack.partition.cut_options import CutOptions
from stagepack_loaders.torch.compilation import compile_ahead
from tools.benchmark_results import BenchmarkResults, add_json_option, benchmark_results

LAYERS = {"cpu": (4, 24), "cuda": (4, 32)}
HIDDEN = {"cpu": 512, "cuda": 2048}
TINY_LAYERS, TINY_HIDDEN = (2, 3), 128
CALLS = 15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny tries the measurements")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    add_json_option(parser)
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
        completed = subprocess.run(
            [sys.executable, "-m", "tools.bench_compile", *arguments],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    seconds: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return seconds


@torch.no_grad()
def _regions(device: str, layers: int, hidden: int) -> dict[str, float]:
    _, ids, bundle = _model(device, layers, hidden)
    pipe = stagepack.load(bundle, [device], compile=True)
    return {"first": _timed(lambda: pipe(ids), device)}


@torch.no_grad()
def _whole(device: str, layers: int, hidden: int) -> dict[str, float]:
    model, ids, bundle = _model(device, layers, hidden)
    whole = torch.compile(model)
    seconds = {"whole": _timed(lambda: whole(ids, use_cache=False), device)}
    failures = [unit.reason for unit in compile_ahead(bundle, bundle.parent / "compiled", device) if unit.reason]
    if failures:
        raise SystemExit(f"not compiled ahead of time: {failures}")
    regions = stagepack.load(bundle, [device], compile=True)
    eager = stagepack.load(bundle, [device])
    regions(ids)
    started = time.perf_counter()
    ahead = stagepack.load(bundle, [device], compiled=bundle.parent / "compiled")
    seconds["ready"] = time.perf_counter() - started
    sides: dict[str, Callable[[], object]] = {
        "steady whole": lambda: whole(ids, use_cache=False),
        "steady by regions": lambda: regions(ids),
        "steady compiled ahead": lambda: ahead(ids),
        "steady eager": lambda: eager(ids),
    }
    times_of_side: dict[str, list[float]] = {side_name: [] for side_name in sides}
    for _ in range(CALLS + 2):
        for side_name, call in sides.items():
            times_of_side[side_name].append(_timed(call, device))
    return seconds | {side_name: statistics.median(side_times[2:]) for side_name, side_times in times_of_side.items()}


_MEASURES = {"regions": _regions, "whole": _whole}


def _model(device: str, layers: int, hidden: int) -> tuple[LlamaForCausalLM, torch.Tensor, Path]:
    """A model with random weights, a batch for it, and its bundle."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(0, 1024, (4, 128), device=device)
    batch, sequence = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("sequence", min=2, max=1024)
    inputs = Inputs(
        kwargs={"input_ids": ids, "use_cache": False}, dynamic_shapes={"input_ids": {0: batch, 1: sequence}}
    )
    out = Path(tempfile.mkdtemp()) / "llama.stagepack"
    export_capture(capture_module(model, inputs), out=out, cut_options=CutOptions(stages=1))
    return model, ids, out


def _timed(call: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
