"""Whatever `stagepack.export` takes as a model -> a captured model."""

import os

import torch
from torch.export import ExportedProgram

from stagepack.capture.hugging_face import capture_pretrained, capture_transformers, is_of_transformers
from stagepack.capture.programs import Capture, Inputs, capture_module, capture_program, load_program
from stagepack.errors import CaptureError


def capture_source(model: torch.nn.Module | ExportedProgram | str | os.PathLike[str], inputs: Inputs) -> Capture:
    """Capture whatever `export` takes as a model.

    Raises:
        CaptureError: it cannot be captured.
    """
    if isinstance(model, torch.nn.Module):
        return capture_transformers(model, inputs) if is_of_transformers(model) else capture_module(model, inputs)
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".pt2"):
            return capture_program(load_program(model), inputs)
        return capture_pretrained(os.fspath(model), inputs)
    raise CaptureError(f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}")
