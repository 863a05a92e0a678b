"""Time to get the graph of a 32-layer Llama of tiny weights ready to run: a bundle's stages against `torch.export.load`.

Both sides are measured in this run, several times in turn; the medians and their ratio are printed.
Loading a bundle's graphs means: read, compare with the digest, check every rule, find the operators, build the fx modules.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stagepack.capture import Inputs, capture_module
from stagepack.exporter import export_capture
from stagepack.format.reader import Bundle
from stagepack.where import Where
from stagepack_loaders.torch.build import build
from stagepack_loaders.torch.ops import resolve


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    batch, sequence = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("sequence", min=2, max=512)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    inputs = Inputs(
        kwargs={"input_ids": torch.randint(0, 128, (2, 8)), "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: sequence}},
    )
    capture = capture_module(LlamaForCausalLM(config).eval(), inputs)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "llama.pt2"
        torch.export.save(capture.program, program)
        bundle = export_capture(capture, out=Path(folder) / "llama.stagepack", where=Where(stages=options.stages))
        nodes = sum(stage.nodes for stage in bundle.stages)
        size = sum(bundle.files[stage.graph].size for stage in bundle.stages)
        ours, theirs = [], []
        for _ in range(options.runs):
            ours.append(_timed(lambda: _load_graphs(bundle.path)))
            theirs.append(_timed(lambda: torch.export.load(program)))
        print(f"{options.layers} layers, {nodes} nodes in {options.stages} stages", end=", ")
        print(f"{size / 1000:.0f} kB of graphs, {program.stat().st_size / 1e6:.1f} MB .pt2")
        print(f"stagepack graphs   {statistics.median(ours):8.3f} s  {' '.join(f'{seconds:.3f}' for seconds in ours)}")
        print(
            f"torch.export.load  {statistics.median(theirs):8.3f} s  {' '.join(f'{seconds:.3f}' for seconds in theirs)}"
        )
        print(f"ratio              1/{statistics.median(theirs) / statistics.median(ours):.1f}")


def _load_graphs(path: Path) -> None:
    bundle = Bundle(path)
    for number in range(len(bundle.stages)):
        file = bundle.graph_file(number)
        build(*file, resolve(file.graph.ops, (), bundle.stages[number].graph), torch.device("cpu"))


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
