"""Models of transformers: load one by its folder or hub name, recognize one, and write its configuration files.

transformers is imported when a model is loaded, not before.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stagepack.capture.torch_messages import format_torch_error
from stagepack.errors import CaptureError
from stagepack.extras import explain_missing_packages
from stagepack.format.weights import ALIGNMENT


def is_transformers_model(model: object) -> bool:
    """Whether a module is a model of transformers. Imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def load_pretrained(source: str) -> Any:
    """Load the model of a folder or a hub name in evaluation mode, by the class that its configuration names.

    Raises:
        CaptureError: there is no such folder, or transformers cannot load the model.
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
        model = model_class.from_pretrained(source).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"{source}: transformers cannot load it: {format_torch_error(error)}") from error
    finally:
        if shows_progress:
            transformers.utils.logging.enable_progress_bar()
    _align_weights(model)
    return model


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
