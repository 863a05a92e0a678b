"""Values of ONNX Runtime from and to numpy arrays and Python numbers. Memory is shared, not copied.

- Inputs that a stage writes: its ONNX model returns their new content as further outputs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy
from onnxruntime import OrtValue

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.onnx import COMPLEX_PART_DTYPES, ELEMENT_TYPES, SCALAR_TENSOR_DTYPES
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_interpreter import is_extension_dtype, numpy_dtype


def to_ort(value: Any, dtype: str) -> OrtValue:
    """Return a value of ONNX Runtime for an array or a number, on the array's memory if that is contiguous."""
    if isinstance(value, OrtValue):
        return value
    if dtype in SCALAR_DTYPES:
        return OrtValue.ortvalue_from_numpy(numpy.array(value, dtype=SCALAR_TENSOR_DTYPES[dtype]))
    if dtype in COMPLEX_PART_DTYPES:
        value = numpy.stack([value.real, value.imag], axis=-1)
    array = numpy.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray gives a scalar a dimension
    if is_extension_dtype(dtype):
        bits = array.view(f"u{array.dtype.itemsize}")
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENT_TYPES[dtype])
    return OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: OrtValue, dtype: str) -> Any:
    """Return a value of ONNX Runtime as a numpy array, on its memory if that is the host's; one of a symbolic scalar as a Python number."""
    if dtype in SCALAR_DTYPES:
        return value.numpy().item()
    array = _host_array(value, numpy_dtype(COMPLEX_PART_DTYPES.get(dtype, dtype)))
    return array.view(numpy_dtype(dtype))[..., 0] if dtype in COMPLEX_PART_DTYPES else array


def is_on_host(value: OrtValue) -> bool:
    """Whether the memory of a value is that of the host."""
    return bool(value.device_name().lower() == "cpu")


def to_host(value: OrtValue) -> OrtValue:
    """Return a value in the memory of the host: itself, or a copy."""
    return value if is_on_host(value) else OrtValue.ortvalue_from_numpy(value.numpy())


def _host_array(value: OrtValue, dtype: numpy.dtype[Any]) -> Array:
    value = to_host(value)
    if 0 in value.shape():
        return numpy.empty(value.shape(), dtype)
    plain_dtype = f"u{dtype.itemsize}" if is_extension_dtype(dtype.name) else dtype.str
    return numpy.asarray(_Memory(value, plain_dtype)).view(dtype)


class _Memory:
    """The memory of a value, for numpy. It keeps the value alive; an array of it keeps the memory alive."""

    def __init__(self, value: OrtValue, dtype: str) -> None:
        self._value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False),
            "shape": tuple(value.shape()),
            "typestr": numpy.dtype(dtype).str,
            "version": 3,
        }


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
