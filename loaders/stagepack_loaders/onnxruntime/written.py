"""Inputs that a stage writes: its ONNX model returns their new content as further outputs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy
from onnxruntime import OrtValue

from stagepack.errors import InputError
from stagepack_loaders.onnxruntime.values import to_numpy


def check_written_inputs(inputs: Mapping[str, Any], written_names: Collection[str]) -> None:
    """Check inputs before a call that writes some of them."""
    for edge_name in written_names:
        if not _is_writeable(inputs[edge_name]):
            raise InputError(f"{edge_name}: the model writes into this input, and it cannot be written: give a copy")
        for other_edge_name in inputs.keys() - {edge_name}:
            if _may_overlap(inputs[edge_name], inputs[other_edge_name]):
                raise InputError(
                    f"{edge_name} and {other_edge_name} share memory, and the model writes {edge_name}: give copies"
                )


def write_input(value: Any, content: OrtValue, dtype: str) -> None:
    """Write the new content of an input into its memory."""
    if isinstance(value, numpy.ndarray):
        numpy.copyto(value, to_numpy(content, dtype))


def _is_writeable(value: Any) -> bool:
    return not isinstance(value, numpy.ndarray) or (
        value.flags.writeable and not _elements_overlap(value.shape, value.strides)
    )


def _elements_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    # numpy gives arrays without elements strides of 0.
    return 0 not in shape and any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def _may_overlap(first: Any, second: Any) -> bool:
    both_arrays = isinstance(first, numpy.ndarray) and isinstance(second, numpy.ndarray)
    return both_arrays and numpy.may_share_memory(first, second)
