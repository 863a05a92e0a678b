"""Numpy arrays from and to files and requests, and compared: what `stagepack_loaders` asks of a runtime."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from safetensors import deserialize
from safetensors.numpy import save_file

from stagepack.format.dtypes import SCALAR_DTYPES, TORCH_DTYPES
from stagepack.format.manifest import Edge
from stagepack_loaders.elements import COMPLEX, ELEMENT_DTYPES, Array
from stagepack_loaders.onnxruntime.values import dtype_of, to_numpy

inference = contextlib.nullcontext


def load(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file. Those of types that numpy has not are of ml_dtypes."""
    return {
        name: numpy.frombuffer(entry["data"], dtype_of(TORCH_DTYPES[entry["dtype"]])).reshape(entry["shape"])
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


def from_elements(array: Array, edge: Edge) -> Any:
    """The value of an edge, as its elements travelled: on their memory; a number for a number."""
    if edge.dtype in SCALAR_DTYPES:
        return array.item()
    if edge.dtype in COMPLEX:
        return array.view(dtype_of(edge.dtype))[..., 0]
    return array.view(dtype_of(edge.dtype)).reshape(array.shape if edge.shape else ())


def to_elements(value: Any, dtype: str) -> Array:
    """The elements of a value as they travel, on the host."""
    if dtype in SCALAR_DTYPES:
        return numpy.array([value], ELEMENT_DTYPES[dtype])
    found = to_numpy(value, dtype)
    array = numpy.ascontiguousarray(found).reshape(found.shape)
    if dtype in COMPLEX:
        array = numpy.stack([array.real, array.imag], axis=-1)
    return numpy.atleast_1d(array).view(ELEMENT_DTYPES[dtype])


from_dlpack = numpy.from_dlpack
join = numpy.concatenate
device_elements = to_elements


def wait(_: object) -> None:
    """A session returns when its work is done."""
