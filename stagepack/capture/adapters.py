"""Adapters of PEFT, such as LoRA -> the model that they belong to, with the adapter merged into its weights.

PEFT, and torch with it, is imported when an adapter is merged, not before.
"""

import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagepack.capture.source_path import model_file
from stagepack.errors import CaptureError, MissingPackageError

CONFIGURATION_NAME: Final = "adapter_config.json"
# Tasks whose model has a head that the checkpoint of the base model may not have.
_CLASS_OF_TASK: Final = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter, of which only the configuration is read.

    Attributes:
        source: its folder or hub name.
        base_model: the folder or hub name of its base model.
        class_name: the class of transformers that loads the base model; None for the one that the configuration of the base model names.
        saved_modules: the names of modules whose weights the adapter has as a whole.
    """

    source: str
    base_model: str
    class_name: str | None
    saved_modules: frozenset[str]


def read_adapter(source: str) -> Adapter | None:
    """Return the adapter of a folder or a hub name; None if there is none."""
    path = model_file(source, CONFIGURATION_NAME)
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


def merge_adapter(adapter: Adapter, load_base_model: Callable[[], Any]) -> Any:
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
