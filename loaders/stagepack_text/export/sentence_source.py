"""The models of sentence-transformers as a kind of source of the export."""

import copy
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

from stagepack.capture.extensions import SourceExtension
from stagepack.capture.imports import torchao_on_demand
from stagepack.capture.transformers.model_folders import MODULES_FILE, SETTINGS_FILE, find_model_file
from stagepack.errors import CaptureError, ExportWarning, MissingPackageError, warn_caller
from stagepack.extras import explain_missing_packages
from stagepack_text.export.sentence_pipeline import SentencePipeline

_KIND: Final = "SentenceTransformer"


class SentenceSource:
    """Loads models of sentence-transformers, and takes those in memory. Implements `SourceExtension`."""

    def wrap(self, model: Any) -> SentencePipeline | None:
        """Return the pipeline of a ``SentenceTransformer``, which is unchanged: the modules are copies with its tensors."""
        package = sys.modules.get("sentence_transformers")
        if package is None or not isinstance(model, package.SentenceTransformer):
            return None
        tensors = [*model.parameters(), *model.buffers()]
        shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        return SentencePipeline(model, {path: copy.deepcopy(module, shared) for path, module in model.named_children()})

    def reads(self, source: str) -> bool:
        """Return whether a folder or a hub name is a pipeline of sentence-transformers."""
        if find_model_file(source, MODULES_FILE) is None:
            return False
        settings_path = find_model_file(source, SETTINGS_FILE)
        try:
            settings = {} if settings_path is None else json.loads(Path(settings_path).read_bytes())
        except ValueError as error:
            raise CaptureError(f"{source}: {SETTINGS_FILE}: expected JSON: {error}") from None
        kind = settings.get("model_type", _KIND) if isinstance(settings, dict) else _KIND
        if kind == "CrossEncoder":
            has = "the bundle has its logits, without what predict() makes of them"
            warn_caller(ExportWarning(f"{source}: is a CrossEncoder of sentence-transformers: {has}"))
            return False
        if kind != _KIND:
            raise CaptureError(
                f"{source}: expected a {_KIND} of sentence-transformers, found a {kind}: pass the module and its example inputs"
            )
        return True

    def load(
        self, source: str, dtype_option: Mapping[str, torch.dtype], loading: AbstractContextManager[object]
    ) -> SentencePipeline:
        """Load a folder or a hub name as a ``SentenceTransformer``, on the CPU."""
        package = import_sentence_transformers(source)
        options = {"model_kwargs": dict(dtype_option)} if dtype_option else {}
        with loading:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = package.SentenceTransformer(source, device="cpu", **options)
            if dtype_option:
                for module in itertools.islice(model.children(), 1, None):
                    module.to(dtype_option["dtype"])
        return SentencePipeline(model, dict(model.named_children()))


def import_sentence_transformers(source: str) -> Any:
    """Import sentence-transformers, for a model in its layout."""
    try:
        with explain_missing_packages(), torchao_on_demand():
            return importlib.import_module("sentence_transformers")
    except MissingPackageError as error:
        message = (
            f"{source}: is a pipeline of sentence-transformers ({MODULES_FILE}), and {error}; for the encoder without its pooling, "
            "pass the module that transformers loads"
        )
        raise MissingPackageError(message, name=error.name, path=error.path) from None


SOURCE: Final[SourceExtension] = SentenceSource()
