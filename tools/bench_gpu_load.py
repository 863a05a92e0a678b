"""Load one stage into the memory of a GPU: stagepack with full verification against the limit of pinned copies and other loaders.

One stage of bf16 weights, 8 GB by default, its file in the page cache. Each loader runs in turns in a process of its own, which imports and
makes the context of the device first; the fastest of the rounds counts. `pinned copy` copies page-locked memory that is filled already. A
loader that is not installed, or fails here, has no figure; the reason is printed. Without a GPU it measures the same on the CPU, where
only some loaders run: `--device cpu --gigabytes 0.5`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.weight_files import FOLDER_VARIABLE
from tools.benchmark_results import add_json_option, benchmark_results
from tools.gpu_load_programs import COPY_LIMIT, LOADERS, PRELUDE

HIDDEN = 4096
TIME_LIMIT = 100  # seconds for a process


class Layers(torch.nn.Module):
    """Linear layers without biases."""

    def __init__(self, layer_count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16) for _ in range(layer_count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers one after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the bundle is written; by default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=[*LOADERS], default=[*LOADERS])
    add_json_option(parser)
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
        limit = seconds.get("pinned copy", float("nan"))
        for loader_name in programs:
            if loader_name in seconds:
                rate = bundle.stages[0].weight_bytes / 1e9 / seconds[loader_name]
                table.add(loader_name, seconds[loader_name], rate, limit / seconds[loader_name])


def make_bundle(path: Path, gigabytes: float) -> Bundle:
    """Write a bundle of one stage whose weights have `gigabytes`: one random matrix, with its rows in other orders."""
    torch.manual_seed(0)
    layer_count = max(1, round(gigabytes * 1e9 / (2 * HIDDEN * HIDDEN)))
    with torch.device("meta"):
        model = Layers(layer_count)
    model.to_empty(device="cpu")
    block = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, torch.nn.Linear)
            layer.weight.copy_(block.roll(index, 0))
    return stagepack.export(model.eval(), (torch.zeros(1, HIDDEN, dtype=torch.bfloat16),), out=path, stages=1)


def measure(programs: dict[str, str], bundle_path: Path, device: str, rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest run of each program; those that fail are missing."""
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for _ in range(rounds):
        for loader_name, program in programs.items():
            if loader_name in failed:
                continue
            read_whole(bundle_path)
            started = time.monotonic()
            try:
                run_seconds = run(program, bundle_path, device)
            except (subprocess.SubprocessError, ValueError) as error:
                failed.add(loader_name)
                reason = getattr(error, "stderr", None) or str(error)
                print(f"{loader_name}: {str(reason).strip().splitlines()[-1][:200]}", file=sys.stderr)
                continue
            seconds[loader_name] = min(run_seconds, seconds.get(loader_name, run_seconds))
            print(f"{loader_name}: {run_seconds:.3f} s ({time.monotonic() - started:.0f} s in all)", file=sys.stderr)
    return seconds


def read_whole(bundle_path: Path) -> None:
    """Read the weight files, so that they are in the page cache."""
    for path in bundle_path.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def run(program: str, bundle_path: Path, device: str) -> float:
    """Run a program in a fresh process; return the seconds that it prints."""
    command = [sys.executable, "-c", PRELUDE + program, str(bundle_path), device]
    # Without the record of verified files, full verification hashes every byte.
    environment = {**os.environ, FOLDER_VARIABLE: ""}
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIME_LIMIT, env=environment)
    return float(json.loads(process.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()
