"""Weights of a stage as read-only numpy arrays on its weight files, which are mapped."""

from collections.abc import Mapping

import numpy
from numpy.lib.stride_tricks import as_strided

from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.weights import read_weight_header
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_arrays import numpy_dtype


def map_stored_tensors(bundle: Bundle, stage_number: int) -> dict[str, Array]:
    """Map the weight files of a stage. The arrays stay valid when the bundle is replaced or removed.

    Returns:
        The bytes of each stored tensor, by name.
    """
    stored_tensors: dict[str, Array] = {}
    bundle.fetch(bundle.stages[stage_number].weights)
    for file_name in bundle.stages[stage_number].weights:
        file_bytes = numpy.memmap(bundle.path / file_name, numpy.uint8, "r")
        header = read_weight_header(bundle.path / file_name)
        stored_tensors.update(
            (stored_name, file_bytes[header_entry.start : header_entry.end])
            for stored_name, header_entry in header.items()
        )
    return stored_tensors


def read_weight(weight: Weight, stored_tensors: Mapping[str, Array]) -> Array:
    """Return a weight as a read-only array.

    Args:
        weight: its entry in the graph.
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
