"""Run the bundles of a folder in a fresh process: FOLDER OPERATORS.

It calls each `NAME.stagepack` with `inputs-0.safetensors` and so on, and writes the results to `NAME.out`. It knows these
alone. OPERATORS is empty, or the module that registers custom operators; their namespace is its package.
"""

import importlib
import sys
from pathlib import Path

import torch

import stagepack
from stagepack_loaders.example import call, read_inputs, write_outputs


def main(folder: str, operators: str) -> None:
    """Run all bundles."""
    allowed = []
    if operators:
        importlib.import_module(operators)
        allowed.append(operators.split(".")[0])
    inputs = sorted(Path(folder).glob("inputs-*.safetensors"))
    for bundle in Path(folder).glob("*.stagepack"):
        pipe = stagepack.load(bundle, allow_ops=allowed)
        bundle.with_suffix(".out").mkdir()
        for number, path in enumerate(inputs):
            torch.manual_seed(0)
            write_outputs(
                pipe, call(pipe, read_inputs(pipe, path)), bundle.with_suffix(".out") / f"{number}.safetensors"
            )
    assert "transformers" not in sys.modules or "transformers" in allowed


if __name__ == "__main__":
    main(*sys.argv[1:])
