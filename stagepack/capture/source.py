"""Any model that `stagepack.export` accepts -> a captured model."""

import os
import zipfile
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from stagepack.capture.advice import advised_capture
from stagepack.capture.hugging_face import capture_around_transformers, capture_pretrained, capture_transformers
from stagepack.capture.inputs import Inputs
from stagepack.capture.pretrained_model import is_transformers_model
from stagepack.capture.programs import SCRIPTED, Capture, capture_module, capture_program, load_program
from stagepack.capture.sentence_pipeline import is_sentence_transformer, sentence_pipeline
from stagepack.errors import CaptureError, OptionError
from stagepack.torch_internals import uncompiled_module


def capture_source(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str],
    inputs: Inputs,
    *,
    dtype: str | torch.dtype | None = None,
) -> Capture:
    """Capture a model of any kind that `export` accepts."""
    is_pretrained = isinstance(model, str | os.PathLike) and not os.fspath(model).endswith(".pt2")
    if dtype is not None and not is_pretrained:
        raise OptionError(
            "dtype: it is for a Hugging Face folder or hub name: convert a module yourself, as in model.to(torch.bfloat16)"
        )
    if isinstance(model, torch.nn.Module):
        module = uncompiled_module(model)
        if is_sentence_transformer(module) and not inputs.args:
            pipeline = sentence_pipeline(module)
            captured = capture_module(pipeline, inputs if inputs.kwargs else pipeline.example())
            return replace(captured, method=f"{captured.method} of {pipeline.description}")
        capture = capture_transformers if is_transformers_model(module) else capture_around_transformers
        with advised_capture():
            return capture(module, inputs)
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".pt2"):
            return capture_program(load_program(model), inputs)
        if os.path.isfile(model) and not os.fspath(model).endswith(".py"):
            if _is_torchscript(model):
                raise CaptureError(f"{model}: {SCRIPTED}")
            raise CaptureError(f"{model}: expected a .pt2 file or a Hugging Face folder, found another file")
        return capture_pretrained(os.fspath(model), inputs, dtype=dtype)
    raise CaptureError(f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}")


def _is_torchscript(path: str | os.PathLike[str]) -> bool:
    """Whether ``torch.jit.save`` wrote a file: a file of ``torch.save`` has no ``constants.pkl``."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())
