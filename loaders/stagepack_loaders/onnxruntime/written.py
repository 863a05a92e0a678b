"""What a stage writes into its inputs, which an ONNX model gives back instead."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy
from onnxruntime import OrtValue

from stagepack.errors import InputError
from stagepack_loaders.onnxruntime.values import is_torch, to_numpy, to_torch


def check_written(given: Mapping[str, Any], written: Collection[str]) -> None:
    """Check inputs before a call that writes some of them.

    Raises:
        InputError: one of these cannot be written, or shares memory with another input, which would not see what is written.
    """
    for name in written:
        if not _is_writeable(given[name]):
            raise InputError(f"{name}: the model writes into this input, and it cannot be written: give a copy")
        for other in given.keys() - {name}:
            if _overlap(given[name], given[other]):
                raise InputError(f"{name} and {other} share memory, and the model writes {name}: give copies")


def write(given: Any, value: OrtValue, dtype: str) -> None:
    """Write what the stage wrote into an input there."""
    if is_torch(given):
        given.copy_(to_torch(value, dtype))
    elif isinstance(given, numpy.ndarray):
        numpy.copyto(given, to_numpy(value, dtype))


def _is_writeable(value: Any) -> bool:
    if is_torch(value):
        return not _repeats(value.shape, value.stride()) and not (value.requires_grad and value.is_leaf)
    return not isinstance(value, numpy.ndarray) or (value.flags.writeable and not _repeats(value.shape, value.strides))


def _repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie on the same memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def _overlap(one: Any, other: Any) -> bool:
    """Whether two arrays, or two tensors, may share memory."""
    if is_torch(one) and is_torch(other):
        memory: int = one.untyped_storage().data_ptr()
        return memory != 0 and memory == other.untyped_storage().data_ptr()
    arrays = isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray)
    return arrays and numpy.may_share_memory(one, other)
