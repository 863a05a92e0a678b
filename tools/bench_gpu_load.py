"""Load one stage into the memory of a GPU: stagepack with full verification against the limit of pinned copies and other loaders.

One stage of bf16 weights, 8 GB by default, its file in the page cache. Each loader runs in turns in a process of its own, which imports and
makes the context of the device first; the fastest of the rounds counts. `pinned copy` copies page-locked memory that is filled already; the
limits of reading and hashing are those of the host. stagepack in blocks of other sizes, and without reading weights, tells where its time
goes. A loader that is not installed, or fails here, has no figure; the reason is printed. Without a GPU it measures the same on the CPU,
where only some loaders run: `--device cpu --gigabytes 0.5`.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.torch.prepare import CHECKED_GRAPHS_VARIABLE
from stagepack_loaders.weight_files import VERIFIED_FILES_VARIABLE
from tools.bench_load import read_limits
from tools.benchmark_models import Layers, without_values
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import run_python, seconds_in_turns
from tools.page_cache import warm_up

HIDDEN = 4096
TIME_LIMIT = 100  # seconds for a process


# sys.argv: the folder of the bundle, the device.
PRELUDE = """
import json, sys, time, torch
bundle, device = sys.argv[1], torch.device(sys.argv[2])
device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
weights = f"{bundle}/stage-0.safetensors"
torch.ones(1, device=device) + 1

def timed(load):
    started = time.perf_counter()
    loaded = load()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps(time.perf_counter() - started))
"""

# Page-locked memory to the device, in pieces of 256 MiB: the fastest that any loader could be.
COPY_LIMIT = """
import os
size, piece = os.path.getsize(weights), 2**28
source = torch.ones(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
target = torch.empty(size, dtype=torch.uint8, device=device)

def copy():
    for start in range(0, size, piece):
        part = target[start : start + piece]
        part.copy_(source[: len(part)], non_blocking=True)

copy()
timed(copy)
"""

_STAGEPACK = """
import blake3, stagepack, stagepack_loaders.load, stagepack_loaders.torch.prepare
timed(lambda: stagepack.load_stage(bundle, 0, device=device, verify="{verify}"))
"""
_BLOCKS = """
from stagepack_loaders.torch import weight_transfer
weight_transfer._BLOCK_BYTES = {mebibytes} * 2**20
"""
LOADERS = {
    "stagepack": _STAGEPACK.format(verify="full"),
    "stagepack, weights not verified": _STAGEPACK.format(verify="manifest"),
    "stagepack, blocks of 1 MiB": _BLOCKS.format(mebibytes=1) + _STAGEPACK.format(verify="full"),
    "stagepack, blocks of 16 MiB": _BLOCKS.format(mebibytes=16) + _STAGEPACK.format(verify="full"),
    "stagepack, no weights": """
import blake3, stagepack, stagepack_loaders.torch.prepare
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import prepare
timed(lambda: prepare(stagepack.open(bundle), Loading(options=LoadOptions(devices=[str(device)], runtime="torch"))))
""",
    # What a GPU is loaded with by default; on the CPU, the same code without page-locked memory.
    "stagepack, stream": """
import blake3, stagepack, stagepack_loaders.load, stagepack_loaders.torch.prepare

def load():
    stage = stagepack.load_stage(bundle, 0, device=device, stream=True)
    stage.wait_for_weights()
    return stage

timed(load)
""",
    "safetensors load_file": """
from safetensors.torch import load_file
timed(lambda: load_file(weights, device=str(device)))
""",
    "safetensors prefetch": """
from safetensors import safe_open

def load():
    with safe_open(weights, framework="pt", device=str(device)) as file:
        return dict(file.prefetch())

timed(load)
""",
    "run:ai streamer": """
from runai_model_streamer import SafetensorsStreamer

def load():
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(weights, device=str(device))
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

timed(load)
""",
    "fastsafetensors": """
from fastsafetensors import fastsafe_open

def load():
    with fastsafe_open(weights, framework="pt", device=str(device), nogds=True) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}

timed(load)
""",
    "InstantTensor, buffered": """
from instanttensor import BackendPolicy, safe_open

def load():
    with safe_open(weights, framework="pt", device=device, backend=BackendPolicy.BUFFERED) as file:
        return dict(file.tensors())

timed(load)
""",
}
PACKAGES = {
    "run:ai streamer": "runai_model_streamer",
    "fastsafetensors": "fastsafetensors",
    "InstantTensor, buffered": "instanttensor",
}


def main() -> None:
    """Print a table."""
    parser = benchmark_parser(__doc__)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the bundle is written; by default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=[*LOADERS], default=[*LOADERS])
    options = parser.parse_args()
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bundle = make_bundle(Path(folder) / "m.stagepack", options.gigabytes)
        table = results.table(
            f"{bundle.stages[0].weight_bytes / 1e9:.1f} GB of bf16 in one stage to {options.device}, fastest of {options.rounds}",
            "loader",
            "seconds",
            "GB/s",
            "of the copy limit",
        )
        programs = {"pinned copy": COPY_LIMIT} | {name: LOADERS[name] for name in options.only}
        seconds = measure(programs, bundle.path, options.device, options.rounds)
        limits = seconds_in_turns(read_limits(bundle.path / "stage-0.safetensors"), options.rounds)
        seconds |= {limit_name: min(limit_seconds) for limit_name, limit_seconds in limits.items()}
        limit = seconds.get("pinned copy", float("nan"))
        for loader_name, loader_seconds in seconds.items():
            rate = bundle.stages[0].weight_bytes / 1e9 / loader_seconds
            table.add(loader_name, loader_seconds, rate, limit / loader_seconds)


def make_bundle(path: Path, gigabytes: float) -> Bundle:
    """Write a bundle of one stage whose weights have `gigabytes`: one random matrix, with its rows in other orders."""
    torch.manual_seed(0)
    layer_count = max(1, round(gigabytes * 1e9 / (2 * HIDDEN * HIDDEN)))
    model = without_values(lambda: Layers(layer_count, HIDDEN, bias=False, dtype=torch.bfloat16))
    block = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            layer.weight.copy_(block.roll(index, 0))
    return stagepack.export(model.eval(), (torch.zeros(1, HIDDEN, dtype=torch.bfloat16),), out=path, stages=1)


def measure(programs: dict[str, str], bundle_path: Path, device: str, rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest run of each program; those that fail are missing."""
    seconds: dict[str, float] = {}
    failed = {name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    print(f"not installed: {', '.join(sorted(failed)) or 'none'}", file=sys.stderr)
    # Without the record of verified files, full verification hashes every byte. Graphs are checked in the first round.
    variables = {VERIFIED_FILES_VARIABLE: "", CHECKED_GRAPHS_VARIABLE: str(bundle_path.parent / "records")}
    for _ in range(rounds):
        for loader_name, program in programs.items():
            if loader_name in failed:
                continue
            for path in bundle_path.glob("*.safetensors"):
                warm_up(path)
            started = time.monotonic()
            arguments = ("-c", PRELUDE + program, str(bundle_path), device)
            try:
                run_seconds = float(run_python(*arguments, timeout=TIME_LIMIT, **variables))
            except (subprocess.SubprocessError, ValueError) as error:
                failed.add(loader_name)
                reason = getattr(error, "stderr", None) or str(error)
                print(f"{loader_name}: {str(reason).strip().splitlines()[-1][:200]}", file=sys.stderr)
                continue
            seconds[loader_name] = min(run_seconds, seconds.get(loader_name, run_seconds))
            print(f"{loader_name}: {run_seconds:.3f} s ({time.monotonic() - started:.0f} s in all)", file=sys.stderr)
    return seconds


if __name__ == "__main__":
    main()
