"""Stages whose weights were changed, by training or otherwise -> a bundle with their weights."""

import contextlib
import json
import os
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stagepack.errors import OptionError, WriteError
from stagepack.format.output_file import TemporaryFolder
from stagepack.format.reader import Bundle, bundle_permissions
from stagepack.format.writer import check_output_path
from stagepack.roads.distributed_weights import DistributedWeights, in_all_processes, weight_names, write_weights
from stagepack.roads.replace import replace_weights
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.registry import TORCH_RUNTIME


def save(
    loaded: DistributedWeights | Pipeline,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool | None = None,
) -> Bundle:
    """Write a bundle with the graphs of a loaded one and the weights as they are now.

    Of a training, all processes must call it: each writes its own weights into a folder beside `out`, which all must reach by this path,
    and process 0 makes the bundle of them. A call that failed can be repeated. Buffers that are not in the `state_dict`, and weights that
    only other entry points use, keep the values of the loaded bundle.

    Args:
        loaded: what `stagepack.train` returned, or what `stagepack.load` returned, in PyTorch and in this process.
        out: the folder to write; None for the one that `stagepack.train` was given.
        overwrite: replace a bundle that exists at `out`; None for what `stagepack.train` was given.

    Returns:
        The new bundle, opened, in all processes.

    Raises:
        OptionError: the weights are not in this process, or not in PyTorch; or `out` is missing.
        OutputExistsError, WriteError: see `stagepack.export`.
        CaptureError: a weight cannot be replaced.
        GroupError: another process failed; the message has its error.
        StageLostError: another process is gone.
    """
    out = getattr(loaded, "out", None) if out is None else out
    overwrite = getattr(loaded, "overwrite", False) if overwrite is None else overwrite
    if out is None:
        raise OptionError("out: expected the folder to write, here or in stagepack.train")
    if isinstance(loaded, CallablePipeline):
        _save_pipeline(loaded, out, overwrite=overwrite)
    else:
        _save_training(loaded, out, overwrite=overwrite)
    return Bundle(out)


def _save_training(training: DistributedWeights, out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Write a bundle of the stages in all processes."""
    with contextlib.ExitStack() as stack:

        def make_folder() -> str:
            return "" if training.rank else str(stack.enter_context(_folder_beside(out, overwrite=overwrite)).path)

        folder = Path(in_all_processes(training, make_folder)[0])
        own_name = f"rank-{training.rank}.safetensors"

        def write_own_weights() -> str:
            write_weights(training.own_weights(), folder / own_name)
            return own_name

        file_names = in_all_processes(training, write_own_weights)

        def write_bundle() -> str:
            if not training.rank:
                _write_index(folder, file_names)
                _replace_weights(training.bundle, folder, training.allow_ops, out=out, overwrite=overwrite)
            return ""

        in_all_processes(training, write_bundle)


def _save_pipeline(pipeline: CallablePipeline, out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Write a bundle of a pipeline in this process."""
    if not isinstance(pipeline, Pipeline) or any(runtime.name != TORCH_RUNTIME for runtime in pipeline.runtimes):
        raise OptionError(
            "save: expected a pipeline in PyTorch in this process, whose weights can be changed: load it with runtime='torch' and without "
            "processes"
        )
    try:
        with _folder_beside(out, overwrite=overwrite) as temporary:
            weight_file = temporary.path / "weights.safetensors"
            write_weights(pipeline.state_dict().items(), weight_file)
            allow_ops = bundle_permissions(pipeline.bundle)
            _replace_weights(pipeline.bundle, weight_file, allow_ops, out=out, overwrite=overwrite)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{os.fspath(out)}: cannot be written: {error}") from error


def _folder_beside(out: str | os.PathLike[str], *, overwrite: bool) -> TemporaryFolder:
    check_output_path(out, overwrite=overwrite)
    return TemporaryFolder(Path(os.path.abspath(out)))


def _replace_weights(
    bundle: Bundle, weights: Path, allow_ops: Collection[str], *, out: str | os.PathLike[str], overwrite: bool
) -> None:
    """Write a bundle with the weights of the trained entry point; those that only others use stay as they are."""
    replace_weights(
        bundle, weights, out=out, allow_ops=allow_ops, overwrite=overwrite, needed_names=weight_names(bundle)
    )


def _write_index(folder: Path, file_names: list[str]) -> None:
    weight_map: dict[str, str] = {}
    for file_name in file_names:
        with safe_open(folder / file_name, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
