"""Numpy arrays from and to files, and compared: what `stagepack_loaders.example` asks of a runtime."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from safetensors import deserialize
from safetensors.numpy import save_file

from stagepack.format.dtypes import STORED_AS
from stagepack_loaders.onnxruntime.values import dtype_of

Array = numpy.ndarray[Any, Any]
inference = contextlib.nullcontext


def load(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file. Those of types that numpy has not are of ml_dtypes."""
    return {
        name: numpy.frombuffer(entry["data"], dtype_of(STORED_AS[entry["dtype"]])).reshape(entry["shape"])
        for name, entry in deserialize(path.read_bytes())
    }


def save(tensors: Mapping[str, Array], path: Path) -> None:
    """Write a safetensors file."""
    save_file({name: numpy.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}, path)


def copy(array: Array) -> Array:
    """A copy, which may be written."""
    return array.copy()


def seed(_: int) -> None:
    """ONNX Runtime draws random numbers of its own."""


def array(value: object) -> Array:
    """An array of a number; an array as it is."""
    return numpy.asarray(value)


def difference(found: Array, expected: Array, rtol: float, atol: float) -> tuple[float, bool]:
    """The largest absolute difference, and whether all are within ``atol + rtol * abs(expected)``.

    0.0 says that every bit is equal, infinity that a shape, a dtype or a special value differs.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, False
    wide = numpy.complex128 if found.dtype.kind == "c" else numpy.float64
    with numpy.errstate(invalid="ignore"):
        ours, theirs = found.astype(wide), expected.astype(wide)
        same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
        apart = numpy.where(same, 0.0, numpy.abs(ours - theirs))
        apart = numpy.where(numpy.isnan(apart), math.inf, apart)
        within = same | (apart <= atol + rtol * numpy.abs(theirs))
    return float(apart.max(initial=0.0)), bool(within.all())
