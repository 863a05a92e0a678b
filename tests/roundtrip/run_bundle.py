"""Run a bundle in a fresh process: BUNDLE OUT OPERATORS INPUTS...: one call for each inputs file, in order.

It knows the bundle alone. OPERATORS is empty, or the module that registers custom operators; their namespace is its package.
"""

import importlib
import sys
from pathlib import Path

import torch

import stagepack
from stagepack_loaders.torch.example import call, read_inputs, write_outputs


def main(bundle: str, out: str, operators: str, *inputs: str) -> None:
    """Write the results of each call to OUT/0.safetensors, OUT/1.safetensors ..."""
    allowed = []
    if operators:
        importlib.import_module(operators)
        allowed.append(operators.split(".")[0])
    pipe = stagepack.load(bundle, allow_ops=allowed)
    for number, path in enumerate(inputs):
        torch.manual_seed(0)
        write_outputs(call(pipe, read_inputs(Path(path))), Path(out) / f"{number}.safetensors")
    assert "transformers" not in sys.modules or "transformers" in allowed


if __name__ == "__main__":
    main(*sys.argv[1:])
