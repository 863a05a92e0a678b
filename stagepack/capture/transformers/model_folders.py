"""Folders and hub names of models, checked before anything slow is imported, and adapters of PEFT, such as LoRA."""

import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from stagepack.errors import CaptureError, MissingPackageError
from stagepack.extras import explain_missing_packages
from stagepack.format.file_checks import near_path_hint
from stagepack.format.manifest_codec import BUNDLE_FORMAT, other_kind_error
from stagepack.format.own_folders import folder_format
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME

# What sentence-transformers runs one after the other.
MODULES_FILE: Final = "modules.json"
# How its pipelines read texts.
SETTINGS_FILE: Final = "config_sentence_transformers.json"
# What diffusers reads first.
PIPELINE_FILE: Final = "model_index.json"
# What transformers' exporters write beside the programs of a model.
EXPORT_MANIFEST: Final = "export.json"
# A hub name may have a dot in it, such as Qwen2.5-0.5B, but not these.
_FILE_SUFFIXES = frozenset(
    (".bin", ".ckpt", ".gguf", ".h5", ".json", ".onnx", ".pt", ".pt2", ".pth", ".py", ".safetensors", ".stagepack")
)
CONFIGURATION_NAME: Final = "adapter_config.json"
# Tasks whose model has a head that the checkpoint of the base model may not have.
_CLASS_OF_TASK: Final = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


def form_of_source(source: str) -> Literal["program", "programs", "function", "file", "pretrained"]:
    """Return what a text names.

    It is a ``.pt2`` file, the folder that an exporter of transformers wrote, ``FILE.py:FUNCTION``, another file, or a Hugging Face folder
    or hub name.
    """
    if source.endswith(".pt2") and not os.path.isdir(source):
        return "program"
    if export_folder(source) is not None:
        return "programs"
    if ":" in source and not os.path.exists(source):
        return "function"
    return "file" if os.path.isfile(source) and not source.endswith(".py") else "pretrained"


def export_folder(source: str) -> str | None:
    """Return the folder of programs that an exporter of transformers wrote, of its path or that of its manifest; None for another source.

    A folder that has weights of a model too is that model: only the path of the manifest names its programs.
    """
    if os.path.basename(source) == EXPORT_MANIFEST and os.path.isfile(source):
        return os.path.dirname(source) or "."
    if not os.path.isfile(os.path.join(source, EXPORT_MANIFEST)):
        return None
    return None if any(name.endswith((".bin", ".safetensors")) for name in os.listdir(source)) else source


def is_model_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has what `load_pretrained` begins with: a configuration of transformers, or modules of sentence-transformers."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MODEL_CONFIG_NAME, MODULES_FILE))


def find_model_file(source: str, file_name: str) -> str | None:
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


def diffusers_class(source: str) -> str | None:
    """Return the class of diffusers that the configuration of a model names, such as in a folder ``unet``; None for another model."""
    path = find_model_file(source, MODEL_CONFIG_NAME)
    try:
        fields = {} if path is None else json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # what is wrong with it is said by the library that loads it
    class_name = fields.get("_class_name") if isinstance(fields, dict) and "model_type" not in fields else None
    return class_name if isinstance(class_name, str) else None


def load_diffusers_model(
    source: str, class_name: str, dtype_option: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Load a model of diffusers by the name of its class; return it with what its checkpoint lacks."""
    try:
        diffusers: Any = importlib.import_module("diffusers")
    except ModuleNotFoundError as error:
        message = f"{source}: is a {class_name} of diffusers, which is not installed: pip install diffusers installs it"
        raise MissingPackageError(message, name=error.name, path=error.path) from error
    model_class: Any = getattr(diffusers, class_name, None)
    if not hasattr(model_class, "from_pretrained"):
        raise CaptureError(
            f"{source}: diffusers {diffusers.__version__} has no model {class_name}: install a newer one"
        )
    options: dict[str, Any] = {f"torch_{name}": value for name, value in dtype_option.items()}
    # Without accelerate, diffusers warns that it loads the weights in the plain way.
    options["low_cpu_mem_usage"] = importlib.util.find_spec("accelerate") is not None
    try:
        model, loading_info = model_class.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:
        # diffusers and the libraries below raise errors of any class.
        [reason] = str(error).splitlines()[:1] or [type(error).__name__]
        raise CaptureError(f"{source}: diffusers cannot load it: {reason}") from error
    return model, {"mismatched_keys": [], **loading_info}


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
            if (found_format := folder_format(Path(source))) not in (None, BUNDLE_FORMAT):
                raise other_kind_error(source, "a model", found_format)
            if os.path.isfile(os.path.join(source, MANIFEST_NAME)):
                raise CaptureError(
                    f"{source}: expected a model, found a bundle: cut it again by 'stagepack recut' (in Python stagepack.recut)"
                )
            if os.path.isfile(os.path.join(source, PIPELINE_FILE)):
                components = [
                    part for part in sorted(os.listdir(source)) if is_model_folder(os.path.join(source, part))
                ]
                first = os.path.join(source, "unet" if "unet" in components else components[0]) if components else ""
                advice = f"export one of its models ({', '.join(components)}), as in 'stagepack export {first}', or "
                raise CaptureError(
                    f"{source}: is a pipeline of diffusers: {advice if components else ''}write a function that returns "
                    f"DiffusionPipeline.from_pretrained({source!r}) and the inputs of its models, such as "
                    "{'unet': stagepack.Inputs(...)}, and pass FILE.py:FUNCTION"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter, of which only the configuration is read."""

    source: str
    base_model: str
    # The class of transformers that loads the base model; None for the one that the configuration of the base model names.
    class_name: str | None
    # The names of modules whose weights the adapter has as a whole.
    saved_modules: frozenset[str]


def read_adapter(source: str) -> Adapter | None:
    """Return the adapter of a folder or a hub name; None if there is none."""
    path = find_model_file(source, CONFIGURATION_NAME)
    if path is None:
        return None
    try:
        fields: Mapping[str, Any] = json.loads(Path(path).read_bytes())
        base_model = fields.get("base_model_name_or_path")
        class_name = (fields.get("auto_mapping") or {}).get("base_model_class")
        saved_modules = frozenset(fields.get("modules_to_save") or ())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CaptureError(f"{path}: expected the configuration of an adapter of PEFT: {error}") from error
    if not isinstance(base_model, str) or not base_model:
        raise CaptureError(
            f"{path}: expected the base model of the adapter in base_model_name_or_path, found none: add it"
        )
    return Adapter(
        source=source,
        base_model=base_model,
        class_name=class_name or _CLASS_OF_TASK.get(str(fields.get("task_type"))),
        saved_modules=saved_modules,
    )


def merge_into_base(adapter: Adapter, load_base_model: Callable[[], Any]) -> Any:
    """Merge an adapter into its base model, as ``merge_and_unload`` of PEFT does."""
    try:
        peft: Any = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        message = f"{adapter.source}: is an adapter of PEFT, which is not installed: pip install peft installs it"
        raise MissingPackageError(message, name=error.name, path=error.path) from error
    base_model = load_base_model()
    try:
        with warnings.catch_warnings():
            # PEFT calls what transformers has deprecated, and warns of tensors that do not fit, which are refused below.
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(base_model, adapter.source)
            load_result = adapted.load_adapter(adapter.source, adapted.active_adapter)
            merged = None if adapted.active_peft_config.is_prompt_learning else adapted.merge_and_unload()
    except Exception as error:
        [reason] = str(error).splitlines()[:1] or [type(error).__name__]
        raise CaptureError(f"{adapter.source}: PEFT cannot merge it into {adapter.base_model}: {reason}") from error
    if merged is None:
        raise CaptureError(
            f"{adapter.source}: an adapter of kind {adapted.peft_type.value} has no weights to merge: load it, and pass the PeftModel "
            "and its inputs to stagepack.export"
        )
    if unfit := [*load_result.unexpected_keys, *load_result.missing_keys]:
        more = f", and {len(unfit) - 1} more" if len(unfit) > 1 else ""
        raise CaptureError(
            f"{adapter.source}: does not fit {adapter.base_model}: {unfit[0]} is in one of them alone{more}: correct "
            f"base_model_name_or_path in its {CONFIGURATION_NAME}"
        )
    for parameter in merged.parameters():
        # PEFT has frozen them; a stage of the bundle can be trained.
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return merged
