"""Weights of a stage as read-only numpy arrays on its weight files, which are mapped."""

from collections.abc import Mapping

import numpy
from numpy.lib.stride_tricks import as_strided

from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_arrays import numpy_dtype
from stagepack_loaders.weight_files import WeightFile, open_weight_files


def map_stored_tensors(bundle: Bundle, stage_number: int, *, verify: bool) -> dict[str, Array]:
    """Map the weight files of a stage. The arrays stay as they are when the bundle is replaced, removed or written into.

    The result is the bytes of each stored tensor, by name.
    """
    weight_files = open_weight_files(bundle, bundle.stages[stage_number].weights, verify=verify, copy=False)
    return stored_tensors(weight_files)


def stored_tensors(weight_files: Mapping[str, WeightFile]) -> dict[str, Array]:
    """Return the bytes of each stored tensor of weight files, by name. They cannot be written."""
    stored: dict[str, Array] = {}
    for weight_file in weight_files.values():
        content = numpy.frombuffer(weight_file.content, numpy.uint8)
        content.flags.writeable = False
        stored.update(
            (stored_name, content[entry.start : entry.end]) for stored_name, entry in weight_file.tensors.items()
        )
    return stored


def read_weight(weight: Weight, stored_tensors: Mapping[str, Array]) -> Array:
    """Return a weight as a read-only array.

    stored_tensors: the bytes of each stored tensor, from `map_stored_tensors`.
    """
    dtype = numpy_dtype(weight.dtype)
    if weight.zeros:
        zeros = numpy.zeros(weight.shape, dtype)
        zeros.flags.writeable = False
        return zeros
    stored_bytes = stored_tensors[weight.stored]
    if weight.base is None:
        return stored_bytes.view(dtype).reshape(weight.shape)
    elements = stored_bytes[: stored_bytes.size - stored_bytes.size % dtype.itemsize].view(dtype)[weight.offset :]
    strides = [stride * dtype.itemsize for stride in weight.strides or ()]
    return as_strided(elements, weight.shape, strides, writeable=False)
