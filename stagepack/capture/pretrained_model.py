"""Models of transformers: load one by its folder or hub name, recognize one, and write its configuration files.

transformers is imported when a model is loaded, not before.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stagepack.capture.checkpoint import CheckpointTensor, checkpoint_file_tensors
from stagepack.capture.deferred_tensors import DataNeededError, DeferredTensors
from stagepack.capture.torch_messages import format_torch_error
from stagepack.errors import CaptureError
from stagepack.extras import explain_missing_packages
from stagepack.format.weights import ALIGNMENT
from stagepack.torch_internals import replaced_checkpoint_tensors

_SHOWN_PROBLEMS = 5


def is_transformers_model(model: object) -> bool:
    """Whether a module is a model of transformers. Imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def load_pretrained(source: str, deferred: DeferredTensors | None = None) -> Any:
    """Load the model of a folder or a hub name in evaluation mode, by the class that its configuration names.

    Args:
        source: the folder or the hub name.
        deferred: where the model's weights are deferred; None to load them. Buffers that no checkpoint has have the values that
            transformers computes for them.

    Raises:
        CaptureError: there is no such folder, transformers cannot load the model, or the checkpoint lacks weights of it.
        DataNeededError: the weights cannot be deferred.
        MissingPackageError: transformers is not installed.
    """
    with explain_missing_packages():
        transformers = importlib.import_module("transformers")
    _check_source(source)
    shows_progress = transformers.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        class_names = getattr(config, "architectures", None) or ["AutoModel"]
        model_class: Any = getattr(transformers, class_names[0], transformers.AutoModel)
        with contextlib.nullcontext() if deferred is None else _deferred_weights(deferred):
            model, loading_info = model_class.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CaptureError(f"{source}: transformers cannot load it: {format_torch_error(error)}") from error
    finally:
        if shows_progress:
            transformers.utils.logging.enable_progress_bar()
    _check_all_loaded(source, type(model).__name__, loading_info)
    model.eval()
    if deferred is None:
        _align_weights(model)
    return model


def _check_all_loaded(source: str, class_name: str, loading_info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint without some weights of the model, for which transformers would draw random ones.

    Raises:
        CaptureError: weights are missing, or have other shapes than in the model.
    """
    problems = [
        f"{name} is {list(found)} instead of {list(expected)}"
        for name, found, expected in sorted(loading_info["mismatched_keys"])
    ] + [f"{name} is missing" for name in sorted(loading_info["missing_keys"])]
    if problems:
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise CaptureError(
            f"{source}: the checkpoint does not have the weights of {class_name}: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}: look at "
            "the architectures of its config.json, or save the model again"
        )


@contextlib.contextmanager
def _deferred_weights(deferred: DeferredTensors) -> Iterator[None]:
    """Let transformers load models with deferred weights, by all of its own code, such as the conversion of weights."""

    def read_files(paths: list[str], quantizer: object) -> dict[str, torch.Tensor]:
        if quantizer is not None:
            raise DataNeededError("the weights are quantized")
        tensors: dict[str, CheckpointTensor] = {}
        for path in paths:
            tensors |= checkpoint_file_tensors(Path(path))
        return {tensor_name: deferred.add(tensor) for tensor_name, tensor in tensors.items()}

    try:
        with replaced_checkpoint_tensors(read_files), deferred:
            yield
    except (OSError, CaptureError, DataNeededError):
        raise
    except Exception as error:
        # Whatever it is: with data in memory it works, or has the error that the user is told.
        raise DataNeededError(format_torch_error(error)) from error


def _check_source(source: str) -> None:
    """Refuse paths here, for which transformers would ask the hub."""
    if os.path.isdir(source):
        if not os.path.isfile(os.path.join(source, "config.json")):
            raise CaptureError(f"{source}: expected a Hugging Face folder with a config.json")
    elif os.path.sep * 2 in source or source.startswith((".", "/")) or source.count("/") > 1:
        raise CaptureError(f"{source}: no such folder; expected a folder, a hub name, a .pt2 file or file.py:factory")


def _align_weights(model: torch.nn.Module) -> None:
    """Move weights whose address is no multiple of 64 bytes, as in a mapped file, to memory where it is.

    Some kernels add in another order on such memory (seen: a matrix times one row on the CPU), so the model would differ from
    every loaded bundle in the last bit.
    """
    aligned: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = aligned.setdefault(tensor.data_ptr(), tensor.data.clone())


def model_files(model: Any) -> dict[str, bytes]:
    """Return the configuration files with which ``from_pretrained`` of transformers opens a bundle.

    Args:
        model: a module of any class.

    Returns:
        The content of each file by its name; nothing for a model that is not of transformers.
    """
    if not is_transformers_model(model):
        return {}
    config_fields = {
        **model.config.to_diff_dict(),
        "architectures": [type(model).__name__],
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    files = {"config.json": _encode_json(config_fields)}
    if model.can_generate():
        files["generation_config.json"] = _encode_json(model.generation_config.to_diff_dict())
    return files


def _encode_json(fields: Mapping[str, Any]) -> bytes:
    """Encode a configuration without the path that the model was loaded from."""
    portable_fields = {key: value for key, value in fields.items() if key != "_name_or_path"}
    return json.dumps(portable_fields, indent=2, sort_keys=True, default=str, ensure_ascii=False).encode() + b"\n"
