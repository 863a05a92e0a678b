"""Trained stages -> a bundle with their weights."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stagepack.errors import GroupError, WriteError
from stagepack.format.reader import Bundle
from stagepack.format.temporary_folder import TemporaryFolder
from stagepack.format.writer import check_output_path
from stagepack.weight_replacement import replace_weights

if TYPE_CHECKING:
    from stagepack_loaders.train.training import Training


def save(training: "Training", *, out: str | os.PathLike[str], overwrite: bool = False) -> Bundle:
    """Write a bundle with the graphs of the trained one and the weights of all processes. All of them must call it.

    Each process writes its own weights into a folder beside `out`, which all must reach by this path; process 0 makes the bundle of
    them. Buffers that are not in the `state_dict`, and weights that only other entry points use, stay those of the trained bundle.

    Args:
        training: what `stagepack.train` returned.
        out: the folder to write.
        overwrite: replace a bundle that exists at `out`.

    Returns:
        The new bundle, opened, in all processes.

    Raises:
        OutputExistsError, WriteError: see `stagepack.export`.
        CaptureError: a weight cannot be replaced.
        GroupError: another process failed; the message has its error.
        StageLostError: another process is gone.
    """
    with contextlib.ExitStack() as stack:

        def make_folder() -> str:
            if training.rank:
                return ""
            check_output_path(out, overwrite=overwrite)
            return str(stack.enter_context(TemporaryFolder(Path(os.path.abspath(out)))).path)

        folder = Path(_in_all_processes(training, make_folder)[0])
        file_names = _in_all_processes(training, lambda: _write_own_weights(training, folder))

        def write_bundle() -> str:
            if not training.rank:
                _write_index(folder, file_names)
                replace_weights(
                    training.bundle,
                    folder,
                    out=out,
                    allow_ops=training.allow_ops,
                    overwrite=overwrite,
                    needed_names=_weight_names(training.bundle),
                )
            return ""

        _in_all_processes(training, write_bundle)
    return Bundle(out)


def _weight_names(bundle: Bundle) -> set[str]:
    """The names of the weights of the trained entry point; those that only others use stay as they are."""
    return {
        weight_name
        for stage_number in range(len(bundle.stages))
        for weight in bundle.graph(stage_number).weights
        for weight_name in weight.names
    }


def _in_all_processes(training: "Training", action: Callable[[], str]) -> list[str]:
    """Do something in all processes at the same time.

    Returns:
        The results of all, by rank.

    Raises:
        Exception: the error of this process.
        GroupError: another process failed.
        StageLostError: another process is gone.
    """
    result = ""
    error: Exception | None = None
    try:
        result = action()
    except (OSError, SafetensorError) as own_error:
        error = WriteError(f"cannot be written: {own_error}")
    except Exception as own_error:  # noqa: BLE001 - the other processes wait for this one, whatever it is
        error = own_error
    outcomes: list[tuple[str, str | None]] = [("", None)] * training.process_count
    with training.guarded():
        torch.distributed.all_gather_object(outcomes, (result, None if error is None else str(error)), training.group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise GroupError(f"process {rank} could not save its part: {message}")
    return [own_result for own_result, _ in outcomes]


def _write_own_weights(training: "Training", folder: Path) -> str:
    """Write the weights that this process saves; return the name of the file."""
    file_name = f"rank-{training.rank}.safetensors"
    weights: dict[str, torch.Tensor] = {}
    known_storages: set[int] = set()
    for weight_name, tensor in training.own_weights():
        # The file has each tensor by itself: one whose memory another one has is copied.
        storage = tensor.untyped_storage().data_ptr()
        weights[weight_name] = tensor.clone() if storage in known_storages else tensor.contiguous()
        known_storages.add(storage)
    save_file(weights, folder / file_name)
    return file_name


def _write_index(folder: Path, file_names: list[str]) -> None:
    weight_map: dict[str, str] = {}
    for file_name in file_names:
        with safe_open(folder / file_name, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
