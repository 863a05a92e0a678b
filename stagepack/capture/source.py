"""Any model that `stagepack.export` accepts -> a captured model."""

import os

import torch
from torch.export import ExportedProgram

from stagepack.capture.hugging_face import capture_pretrained, capture_transformers
from stagepack.capture.inputs import Inputs
from stagepack.capture.pretrained_model import is_transformers_model
from stagepack.capture.programs import Capture, capture_module, capture_program, load_program
from stagepack.errors import CaptureError
from stagepack.torch_internals import uncompiled_module


def capture_source(model: torch.nn.Module | ExportedProgram | str | os.PathLike[str], inputs: Inputs) -> Capture:
    """Capture a model of any kind that `export` accepts.

    Args:
        model: a module, an exported program, a ``.pt2`` file, or a Hugging Face folder or hub name.
        inputs: the example inputs; an exported program and a Hugging Face model may do without.

    Raises:
        CaptureError: the model is of another type, or cannot be loaded or captured.
        MissingPackageError: a Hugging Face model needs transformers, which is not installed.
    """
    if isinstance(model, torch.nn.Module):
        module = uncompiled_module(model)
        capture = capture_transformers if is_transformers_model(module) else capture_module
        return capture(module, inputs)
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".pt2"):
            return capture_program(load_program(model), inputs)
        if os.path.isfile(model):
            raise CaptureError(f"{model}: expected a .pt2 file or a Hugging Face folder, found another file")
        return capture_pretrained(os.fspath(model), inputs)
    raise CaptureError(f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}")
