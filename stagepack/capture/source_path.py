"""Paths of models that users name, checked before anything slow is imported. Without torch."""

import importlib
import os
from typing import Any, Final

from stagepack.errors import CaptureError
from stagepack.extras import explain_missing_packages
from stagepack.format.file_checks import near_path_hint
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME

# What sentence-transformers runs one after the other.
MODULES_FILE: Final = "modules.json"
# What diffusers reads first.
PIPELINE_FILE: Final = "model_index.json"
# A hub name may have a dot in it, such as Qwen2.5-0.5B, but not these.
_FILE_SUFFIXES = frozenset(
    (".bin", ".ckpt", ".gguf", ".h5", ".json", ".onnx", ".pt", ".pt2", ".pth", ".py", ".safetensors", ".stagepack")
)


def is_model_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has what `load_pretrained` begins with: a configuration of transformers, or modules of sentence-transformers."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MODEL_CONFIG_NAME, MODULES_FILE))


def model_file(source: str, file_name: str) -> str | None:
    """Return the path of a file of a model's folder, or of a hub name, which is downloaded; None if there is none."""
    if os.path.exists(source):
        path = os.path.join(source, file_name)
        return path if os.path.isfile(path) else None
    if _looks_like_path(source):
        return None
    with explain_missing_packages("hf"):
        hub: Any = importlib.import_module("huggingface_hub")
    try:
        downloaded: str = hub.hf_hub_download(source, file_name)
    except (OSError, ValueError, hub.errors.EntryNotFoundError):
        return None  # that there is no such model is said when it is loaded
    return downloaded


def check_source_path(source: str) -> None:
    """Refuse the path of a model that does not exist, before torch is imported."""
    if os.path.exists(source):
        return
    file_name, separator, _ = source.rpartition(":")
    if not separator:
        check_model_path(source)
    elif file_name.endswith(".py") and not os.path.isfile(file_name):
        raise CaptureError(f"{file_name}: no such file{near_path_hint(file_name)}")


def check_model_path(source: str) -> None:
    """Refuse paths, for which transformers would ask the hub."""
    if os.path.isdir(source):
        if not is_model_folder(source):
            if os.path.isfile(os.path.join(source, MANIFEST_NAME)):
                raise CaptureError(
                    f"{source}: expected a model, found a bundle: cut it again by 'stagepack recut' (in Python stagepack.recut)"
                )
            if os.path.isfile(os.path.join(source, PIPELINE_FILE)):
                raise CaptureError(
                    f"{source}: is a pipeline of diffusers: write a function that returns DiffusionPipeline.from_pretrained({source!r}) "
                    "and the inputs of its models, such as {'unet': stagepack.Inputs(...)}, and pass FILE.py:FUNCTION"
                )
            raise CaptureError(f"{source}: expected a Hugging Face folder with a config.json")
    elif source.endswith(".py"):
        raise CaptureError(
            f"{source}: expected FILE.py:FUNCTION, found no function: name the function that makes the model, such as {source}:make"
        )
    elif os.path.exists(source):
        raise CaptureError(f"{source}: expected a Hugging Face folder, found a file")
    elif _looks_like_path(source):
        raise CaptureError(
            f"{source}: no such file or folder; expected a folder, a hub name, a .pt2 file or FILE.py:FUNCTION{near_path_hint(source)}"
        )


def _looks_like_path(source: str) -> bool:
    """Whether a source cannot be a hub name, which is ``NAME`` or ``OWNER/NAME``, or is the name of a file."""
    return (
        source.startswith((".", "/", "~"))
        or source.endswith(("/", "\\"))
        or source.count("/") > 1
        or os.path.splitext(source)[1].lower() in _FILE_SUFFIXES
    )
