"""Weights of a stage: from its files to numpy arrays, mapped read-only where the array lies in the file as it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from stagepack.format.graph import Weight
from stagepack.format.weights import StoredTensor
from stagepack_loaders.onnxruntime.values import dtype_of


def read_weight(weight: Weight, places: Mapping[str, tuple[Path, StoredTensor]]) -> numpy.ndarray[Any, Any]:
    """A weight as an array that must not be written."""
    dtype = dtype_of(weight.dtype)
    if weight.zeros:
        return numpy.zeros(weight.shape, dtype)
    path, place = places[weight.stored]
    if place.start == place.end:
        return numpy.empty(weight.shape, dtype)
    octets = numpy.memmap(path, numpy.uint8, "r", place.start, (place.end - place.start,))
    if weight.base is None:
        return octets.view(dtype).reshape(weight.shape)
    elements = octets[: octets.size - octets.size % dtype.itemsize].view(dtype)[weight.offset :]
    strides = [stride * dtype.itemsize for stride in weight.strides or ()]
    return as_strided(elements, weight.shape, strides, writeable=False)
