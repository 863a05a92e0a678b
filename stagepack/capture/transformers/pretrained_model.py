"""Models of transformers: load one by its folder or hub name, and write its configuration files."""

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stagepack.capture.checkpoint import CheckpointTensor, DataNeededError, DeferredTensors, checkpoint_file_tensors
from stagepack.capture.extensions import LibraryModel, SourceExtension, extension_that_reads
from stagepack.capture.imports import import_transformers, quiet_libraries
from stagepack.capture.torch_messages import format_torch_error
from stagepack.capture.transformers.model_folders import (
    CONFIGURATION_NAME,
    Adapter,
    check_model_path,
    diffusers_class,
    load_diffusers_model,
    merge_into_base,
    read_adapter,
)
from stagepack.capture.user_model import is_transformers_model
from stagepack.errors import CaptureError, OptionError
from stagepack.format.rules import MODEL_CONFIG_NAME
from stagepack.format.weights import ALIGNMENT
from stagepack.torch_internals import replaced_checkpoint_tensors, wrapped_attributes

_SHOWN_PROBLEMS = 5
# The dtypes that a model is loaded in, by name.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
# Errors of the hub's client and of the HTTP client below it, which are not imported for their names.
_CONNECTION_ERRORS = frozenset(
    ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ProxyError")
)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype that a caller names for the weights of a model."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise OptionError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype}")
    return DTYPES[name]


def load_pretrained(
    source: str, deferred: DeferredTensors | None = None, *, dtype: str | torch.dtype | None = None
) -> Any:
    """Load the model of a folder or a hub name in evaluation mode, by the class that its configuration names.

    dtype: what its weights are converted to; None for the dtype of the checkpoint.
    deferred: where its weights are deferred; None to load them. Buffers that no checkpoint has are computed by transformers.
    """
    dtype_option = {} if dtype is None else {"dtype": parse_dtype(dtype)}
    extension = extension_that_reads(source)
    # An adapter in a model of an extension belongs to a part of it.
    adapter = None if extension is not None else read_adapter(source)
    class_name = None if extension is not None or adapter is not None else diffusers_class(source)
    if class_name is not None:
        if deferred is not None:
            raise DataNeededError("diffusers reads the weights of its models")
        with quiet_libraries():
            model, loading_info = load_diffusers_model(source, class_name, dtype_option)
        _check_all_loaded(source, class_name, loading_info, ())
    elif adapter is None:
        check_model_path(source)
        if extension is None:
            model = _load(source, deferred, dtype_option)
        else:
            model = _load_by_extension(extension, source, deferred, dtype_option)
    elif deferred is not None:
        raise DataNeededError("an adapter is merged into the weights")
    else:
        with _errors_name_adapter(adapter):
            check_model_path(adapter.base_model)
        model = merge_into_base(adapter, partial(_load_base_model, adapter, dtype_option))
    model.eval()
    if deferred is None:
        _align_weights(model)
    return model


def _load_by_extension(
    extension: SourceExtension,
    source: str,
    deferred: DeferredTensors | None,
    dtype_option: Mapping[str, torch.dtype],
) -> LibraryModel:
    loading = contextlib.nullcontext() if deferred is None else _deferred_weights(deferred)
    with _quiet_loading(source):
        return extension.load(source, dtype_option, loading)


def _load(
    source: str,
    deferred: DeferredTensors | None,
    dtype_option: Mapping[str, torch.dtype],
    *,
    class_name: str | None = None,
    absent: Collection[str] = (),
) -> Any:
    """Load a model by a class of transformers; the checkpoint may lack the weights of modules with the names `absent`."""
    with _quiet_loading(source) as transformers:
        config = transformers.AutoConfig.from_pretrained(source)
        class_names = [class_name, *(getattr(config, "architectures", None) or []), "AutoModel"]
        model_class: Any = getattr(transformers, next(filter(None, class_names)), transformers.AutoModel)
        with contextlib.nullcontext() if deferred is None else _deferred_weights(deferred):
            model, loading_info = model_class.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **dtype_option
            )
    _check_all_loaded(source, type(model).__name__, loading_info, absent)
    return model


@contextlib.contextmanager
def _quiet_loading(source: str) -> Iterator[Any]:
    """Import transformers, which shows no progress in a pipe within the ``with`` block."""
    transformers = import_transformers()
    shows_progress = transformers.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        with quiet_libraries():
            yield transformers
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CaptureError(f"{source}: {_loading_failure(source, error)}") from error
    finally:
        if shows_progress:
            transformers.utils.logging.enable_progress_bar()


def _load_base_model(adapter: Adapter, dtype_option: Mapping[str, torch.dtype]) -> Any:
    """Load the base model of an adapter, which may be a path relative to the folder where the adapter was trained, as a hub name is."""
    is_folder = os.path.isdir(adapter.base_model)
    with contextlib.nullcontext() if is_folder else _errors_name_adapter(adapter):
        return _load(
            adapter.base_model, None, dtype_option, class_name=adapter.class_name, absent=adapter.saved_modules
        )


@contextlib.contextmanager
def _errors_name_adapter(adapter: Adapter) -> Iterator[None]:
    """Let errors of a base model that is not where it was when the adapter was trained name the file that says where it is."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(
            f"{adapter.source}: is an adapter of the base model {adapter.base_model!r}: {error}: write where it is into "
            f"base_model_name_or_path of {os.path.join(adapter.source, CONFIGURATION_NAME)}"
        ) from error


def _check_all_loaded(source: str, class_name: str, loading_info: Mapping[str, Any], absent: Collection[str]) -> None:
    """Refuse a checkpoint without some weights of the model, for which transformers would draw random ones."""
    problems = [
        f"{name} is {list(found)} instead of {list(expected)}"
        for name, found, expected in sorted(loading_info["mismatched_keys"])
    ] + [
        f"{name} is missing" for name in sorted(loading_info["missing_keys"]) if not set(absent) & set(name.split("."))
    ]
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


def _loading_failure(source: str, error: Exception) -> str:
    """Why transformers does not load a model, on one line."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)  # type: ignore[arg-type]
    is_unreachable = any(
        isinstance(cause, ConnectionError) or type(cause).__name__ in _CONNECTION_ERRORS for cause in causes
    )
    if is_unreachable and not os.path.isdir(source):
        return (
            "there is no such folder, and the Hugging Face Hub, where a model of this name may be, cannot be reached: check the path, or "
            "the connection"
        )
    return f"transformers cannot load it: {format_torch_error(error)}"


def _align_weights(model: torch.nn.Module) -> None:
    """Move weights whose address is no multiple of 64 bytes, as in a mapped file, to memory where it is.

    Some kernels add in another order on such memory (seen: a matrix times one row on the CPU): every loaded bundle would differ in a bit.
    """
    aligned: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = aligned.setdefault(tensor.data_ptr(), tensor.data.clone())


def model_files(model: Any) -> dict[str, bytes]:
    """Return the configuration files with which ``from_pretrained`` of transformers opens a bundle, and those that read texts."""
    if isinstance(model, LibraryModel):
        return dict(model.files)
    if not is_transformers_model(model):
        return {}
    config_fields = {
        **model.config.to_diff_dict(),
        "architectures": [type(model).__name__],
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    # Parts of quantized weights are no checkpoint: from_pretrained would make random weights, with a log of missing keys.
    is_quantized = any(wrapped_attributes(parameter) for parameter in model.parameters())
    files = {} if is_quantized else {MODEL_CONFIG_NAME: _encode_json(config_fields)}
    if model.can_generate():
        files["generation_config.json"] = _encode_json(model.generation_config.to_diff_dict())
    return files


def _encode_json(fields: Mapping[str, Any]) -> bytes:
    """Encode a configuration without the path that the model was loaded from."""
    portable_fields = {key: value for key, value in fields.items() if key != "_name_or_path"}
    return json.dumps(portable_fields, indent=2, sort_keys=True, default=str, ensure_ascii=False).encode() + b"\n"
