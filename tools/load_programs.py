"""What `tools.bench_load` times: ``python -m tools.load_programs NAME FOLDER`` loads one model in this process and prints JSON.

Every program loads the same bytes and computes the same answer, which reads every weight once. Imports are not timed, and neither is what
torch does at its first call.
"""

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.benchmark_models import Layers
from tools.measuring import memory_of_status

BUNDLE = "model.stagepack"
WEIGHTS = f"{BUNDLE}/stage-0.safetensors"
CHECKPOINT = "model.pt"
PROGRAM = "model.pt2"
WIDTH = 4096
VERIFIED_FILES = "STAGEPACK_VERIFIED_FILES"

Answer = Callable[[torch.Tensor], object]


def _empty_model(folder: Path) -> Layers:
    layer_count = round((folder / WEIGHTS).stat().st_size / (WIDTH * WIDTH * 4))
    with torch.device("meta"):
        return Layers(layer_count, WIDTH)


def _stagepack(**options: object) -> Callable[[Path], Answer]:
    def load(folder: Path) -> Answer:
        import stagepack  # noqa: PLC0415 - imported before, and only by the programs that need it

        pipeline: Answer = stagepack.load(folder / BUNDLE, **options)  # type: ignore[call-overload]
        return pipeline

    return load


def _safetensors(folder: Path) -> Answer:
    from safetensors.torch import load_file  # noqa: PLC0415 - see above

    model = _empty_model(folder)
    model.load_state_dict(load_file(folder / WEIGHTS), strict=False, assign=True)
    return model


def _torch_load(*, mmap: bool) -> Callable[[Path], Answer]:
    def load(folder: Path) -> Answer:
        model = _empty_model(folder)
        state = torch.load(folder / CHECKPOINT, mmap=mmap, weights_only=True)  # noqa: TID251 - the loader to compare with
        model.load_state_dict(state, assign=True)
        return model

    return load


def _accelerate(folder: Path) -> Answer:
    accelerate: Any = importlib.import_module("accelerate")
    answer: Answer = accelerate.load_checkpoint_and_dispatch(
        _empty_model(folder), str(folder / WEIGHTS), device_map={"": "cpu"}
    )
    return answer


def _torch_export(folder: Path) -> Answer:
    answer: Answer = torch.export.load(folder / PROGRAM).module()
    return answer


def _without_records(*variables: str) -> Callable[[Path], Answer]:
    def load(folder: Path) -> Answer:
        os.environ |= dict.fromkeys(variables, "")
        return _stagepack()(folder)

    return load


_STAGEPACK = ("stagepack_loaders.torch.prepare",)

# By name: the packages that must be installed, the file that is loaded, and the program.
PROGRAMS: dict[str, tuple[tuple[str, ...], str, Callable[[Path], Answer]]] = {
    "stagepack, verify=full": (_STAGEPACK, WEIGHTS, _stagepack()),
    "stagepack, verify=full, first load": ((*_STAGEPACK, "blake3"), WEIGHTS, _without_records(VERIFIED_FILES)),
    "stagepack, verify=full, new machine": (
        (*_STAGEPACK, "blake3"),
        WEIGHTS,
        _without_records(VERIFIED_FILES, "STAGEPACK_CHECKED_GRAPHS"),
    ),
    "stagepack, verify=full, copy": (_STAGEPACK, WEIGHTS, _stagepack(copy=True)),
    "stagepack, verify=manifest": (_STAGEPACK, WEIGHTS, _stagepack(verify="manifest")),
    "stagepack, stream": (_STAGEPACK, WEIGHTS, _stagepack(stream=True)),
    "safetensors, mapped": (("safetensors.torch",), WEIGHTS, _safetensors),
    "torch.load, mmap": ((), CHECKPOINT, _torch_load(mmap=True)),
    "torch.load": ((), CHECKPOINT, _torch_load(mmap=False)),
    "accelerate": (("accelerate",), WEIGHTS, _accelerate),
    "torch.export.load": (("torch.export",), PROGRAM, _torch_export),
}


def is_installed(program_name: str) -> bool:
    """Whether the packages of a program are installed."""
    return all(importlib.util.find_spec(package.partition(".")[0]) is not None for package in PROGRAMS[program_name][0])


def main(program_name: str, folder: Path) -> None:
    """Load a model and compute one answer; print the seconds of both and the memory that they took."""
    packages, _, load = PROGRAMS[program_name]
    for package in packages:
        importlib.import_module(package)
    importlib.import_module("stagepack_loaders.load")
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        Layers(1, WIDTH)(x)
        # The threads of that call wait for more work in a loop for a while, on processors that are then not free.
        time.sleep(0.5)
        memory_before = memory_of_status("RssAnon")
        processor_time, start_time = time.process_time(), time.perf_counter()
        answer = load(folder)
        load_time = time.perf_counter()
        output = answer(x)
        end_time = time.perf_counter()
        assert isinstance(output, torch.Tensor)
        measured = {
            "load": load_time - start_time,
            "answer": end_time - start_time,
            "processor": time.process_time() - processor_time,
            "memory": memory_of_status("RssAnon") - memory_before,
            "check": float(output.double().sum()),
        }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
