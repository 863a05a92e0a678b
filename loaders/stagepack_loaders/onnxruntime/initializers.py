"""The initializers of an ONNX model as values of ONNX Runtime, on the memory of the weight files.

ONNX Runtime would map the files itself, by their paths and without a lease (`stagepack_loaders.file_leases`).
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy
from onnxruntime import OrtValue

from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.onnx import ELEMENT_TYPES, OnnxModel
from stagepack_loaders.weight_files import WeightFile

_ITEM_SIZE_OF_TYPE: Final = {element_type: ITEM_SIZE[dtype] for dtype, element_type in ELEMENT_TYPES.items()}


def initializers_in_files(model: OnnxModel, weight_files: Mapping[str, WeightFile]) -> dict[str, OrtValue] | None:
    """Return the initializers whose bytes are in weight files, by name."""
    if len(model.initializers) < len(model.tensors):
        return None
    values = {}
    for tensor in model.initializers:
        item_size = _ITEM_SIZE_OF_TYPE.get(tensor.element_type, 0)
        if not item_size or math.prod(tensor.shape) * item_size != tensor.length:
            return None
        content = weight_files[tensor.location].content
        elements = numpy.frombuffer(content, f"u{item_size}", math.prod(tensor.shape), tensor.offset)
        values[tensor.name] = OrtValue.ortvalue_from_numpy_with_onnx_type(
            elements.reshape(tensor.shape), tensor.element_type
        )
    return values
