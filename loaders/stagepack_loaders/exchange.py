"""Values that cross from one runtime to another, or between a runtime and a caller."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack_loaders.base import ArrayOps, Runtime
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.registry import runtimes


def array_ops_of(value: object) -> ArrayOps:
    """Return the operations on a value: the operations of numpy arrays, or of the first runtime that takes it."""
    if NUMPY_ARRAYS.is_array(value):
        return NUMPY_ARRAYS
    for runtime in runtimes():
        if runtime.takes(value):
            return runtime.arrays
    class_name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    cure = ": torch.from_dlpack makes a tensor of it" if hasattr(value, "__dlpack__") else ""
    raise InputError(f"expected a numpy array, or a tensor of a runtime, found {class_name}{cure}")


def to_runtime(value: Any, value_type: Value | Edge, runtime: Runtime) -> Any:
    """Return a value as a stage of a runtime takes it; the same object if the stage takes it as it is."""
    if value_type.dtype in SCALAR_DTYPES or runtime.takes(value):
        return value
    return _convert(value, value_type, runtime.arrays)


def to_array(value: Any, value_type: Value | Edge, arrays: ArrayOps) -> Any:
    """Return a value as a caller gets it, who uses arrays of some kind; the same object if it is one."""
    if value_type.dtype in SCALAR_DTYPES or arrays.is_array(value):
        return value
    converted_value = _convert(value, value_type, arrays)
    if arrays.is_array(converted_value):
        return converted_value
    # The value is in the memory of a device, where callers of this kind have no arrays.
    return arrays.from_elements(to_elements(converted_value, value_type), value_type)


def to_elements(value: Any, value_type: Value | Edge) -> Array:
    """Return the elements of a value of any runtime, on the host."""
    source_arrays = NUMPY_ARRAYS if value_type.dtype in SCALAR_DTYPES else array_ops_of(value)
    return source_arrays.to_elements(value, value_type.dtype)


def check_shared_memory(values: Mapping[str, Any], written_names: Collection[str]) -> None:
    """Check inputs of a model that writes some of them, before a call of several stages.

    A stage that reads one of two inputs on the same memory may run before or after the stage that writes the other.
    """
    for written_name in values.keys() & set(written_names):
        written_range = _memory_range(values[written_name])
        for other_name in values.keys() - {written_name}:
            other_range = _memory_range(values[other_name])
            if max(written_range.start, other_range.start) < min(written_range.stop, other_range.stop):
                raise InputError(
                    f"{written_name} and {other_name} share memory, and the model writes {written_name}: give copies"
                )


def _memory_range(value: Any) -> range:
    """The addresses of a tensor of torch or an array of numpy; empty for other values."""
    if hasattr(value, "data_ptr"):
        address, item_bytes = value.data_ptr(), value.element_size()
        strides = [stride * item_bytes for stride in value.stride()]
    elif isinstance(value, numpy.ndarray):
        address, item_bytes, strides = value.ctypes.data, value.itemsize, list(value.strides)
    else:
        return range(0)
    if 0 in value.shape:
        return range(0)
    reaches = [stride * (size - 1) for size, stride in zip(value.shape, strides, strict=True)]
    lowest, highest = (sum(filter(is_part, reaches)) for is_part in ((0).__gt__, (0).__lt__))
    return range(address + lowest, address + highest + item_bytes)


def array_ops_of_call(values: Iterable[Any], default: ArrayOps) -> ArrayOps:
    """Return the operations on the arrays that a caller uses, by the first array; `default` if there is no array."""
    for value in values:
        if hasattr(value, "shape"):
            return array_ops_of(value)
    return default


def _convert(value: Any, value_type: Value | Edge, target_arrays: ArrayOps) -> Any:
    """Convert a value by its elements, on the device where both sides can."""
    try:
        source_arrays = array_ops_of(value)
        if target_arrays.takes_device_memory(value_type.dtype) and not source_arrays.on_host(value):
            elements = source_arrays.device_elements(value, value_type.dtype)
        else:
            elements = source_arrays.to_elements(value, value_type.dtype)
    except InputError as error:
        raise InputError(f"{value_type.name}: {error}") from None
    return target_arrays.from_elements(elements, value_type)
