"""A model as a bundle of which each stage has an ONNX model, in ONNX Runtime."""

from pathlib import Path
from typing import Any

import torch

import stagepack


def in_onnxruntime(model: torch.nn.Module, args: tuple[Any, ...], folder: Path, **options: Any) -> Any:
    """Export a model into a folder and load it; no stage stays in torch."""
    bundle = stagepack.export(model, args, out=folder / "m.stagepack", **options)
    assert stagepack.add_onnx(bundle).torch_only == {}
    return stagepack.load(bundle.path, runtime="onnxruntime")
