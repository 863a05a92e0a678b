"""Run the bundles of folders, each in a fresh process: a line of standard input is FOLDER and OPERATORS, with a tab between.

The processes are forks of this one, which has imported torch and stagepack and nothing else; a line of output is the status of one.
It calls each `NAME.stagepack` with `inputs-0.safetensors` and so on, and writes the results to `NAME.out`. It knows these
alone. OPERATORS is empty, or the module that registers the custom operators of the bundles.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

import torch

import stagepack
from stagepack_loaders.example import read_inputs, run_on_inputs, write_outputs

# What the models are made with, which no loader imports.
LIBRARIES = {
    *(
        "diffusers",
        "open_clip",
        "peft",
        "sam2",
        "segmentation_models_pytorch",
        "sentence_transformers",
        "speechbrain",
        "timm",
    ),
    *("torch_geometric", "torchao", "torchaudio", "torchvision", "transformers", "ultralytics", "whisper"),
}


def main(folder: str, operators: str) -> None:
    """Run all bundles."""
    if operators:
        importlib.import_module(operators)
    imported = set(sys.modules)
    inputs = sorted(Path(folder).glob("inputs-*.safetensors"))
    for bundle in Path(folder).glob("*.stagepack"):
        stages = stagepack.open(bundle).stages if operators else ()
        pipe = stagepack.load(bundle, allow_ops={name for stage in stages for name in stage.namespaces})
        bundle.with_suffix(".out").mkdir()
        for number, path in enumerate(inputs):
            torch.manual_seed(0)
            write_outputs(
                pipe, run_on_inputs(pipe, read_inputs(pipe, path)), bundle.with_suffix(".out") / f"{number}.safetensors"
            )
    loaded = {name.partition(".")[0] for name in set(sys.modules) - imported}
    assert not loaded & LIBRARIES, f"imported by a loader: {loaded & LIBRARIES}"


def main_of_child(folder: str, operators: str) -> int:
    """Run all bundles; the status to exit with."""
    try:
        main(folder, operators)
    except BaseException:  # noqa: BLE001 - the status tells
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            os._exit(main_of_child(*line.rstrip("\n").split("\t")))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
