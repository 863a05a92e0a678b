"""Weights of a stage: from its files, mapped read-only, to numpy arrays."""

from collections.abc import Mapping
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.weights import read_weight_header
from stagepack_loaders.onnxruntime.values import dtype_of

Array = numpy.ndarray[Any, Any]


def map_tensors(bundle: Bundle, stage: int) -> dict[str, Array]:
    """The bytes of each tensor in the weight files of a stage. They stay what they are when the bundle is replaced or removed."""
    found: dict[str, Array] = {}
    for name in bundle.stages[stage].weights:
        octets = numpy.memmap(bundle.path / name, numpy.uint8, "r")
        index = read_weight_header(bundle.path / name)
        found.update((tensor, octets[place.start : place.end]) for tensor, place in index.items())
    return found


def read_weight(weight: Weight, tensors: Mapping[str, Array]) -> Array:
    """A weight as an array that must not be written."""
    dtype = dtype_of(weight.dtype)
    if weight.zeros:
        return numpy.zeros(weight.shape, dtype)
    octets = tensors[weight.stored]
    if weight.base is None:
        return octets.view(dtype).reshape(weight.shape)
    elements = octets[: octets.size - octets.size % dtype.itemsize].view(dtype)[weight.offset :]
    strides = [stride * dtype.itemsize for stride in weight.strides or ()]
    return as_strided(elements, weight.shape, strides, writeable=False)
