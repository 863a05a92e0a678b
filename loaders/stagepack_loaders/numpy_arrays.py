"""The operations on numpy arrays of a runtime whose stages take these.

Dtypes that numpy lacks, such as bfloat16, come from ml_dtypes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.lib.stride_tricks import as_strided
from safetensors import deserialize
from safetensors.numpy import save_file

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES, TORCH_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack_loaders.elements import COMPLEX_DTYPES, ELEMENT_DTYPES, Array, numpy_dtype


class NumpyArrays:
    """The operations of `stagepack_loaders.base.ArrayOps` on numpy arrays. Runtimes that work on these may use it or extend it."""

    def is_array(self, value: object) -> bool:
        """See `ArrayOps`."""
        return isinstance(value, numpy.ndarray)

    def load(self, path: Path) -> dict[str, Array]:
        """See `ArrayOps`."""
        return {
            array_name: numpy.frombuffer(
                header_entry["data"], numpy_dtype(TORCH_DTYPES[header_entry["dtype"]])
            ).reshape(header_entry["shape"])
            for array_name, header_entry in deserialize(path.read_bytes())
        }

    def save(self, arrays: Mapping[str, Array], path: Path) -> None:
        """See `ArrayOps`."""
        save_file(
            {array_name: numpy.ascontiguousarray(array).reshape(array.shape) for array_name, array in arrays.items()},
            path,
        )

    def copy(self, array: Array) -> Array:
        """See `ArrayOps`."""
        return array.copy()

    def array(self, value: object) -> Array:
        """See `ArrayOps`."""
        return numpy.asarray(value)

    def join(self, arrays: Sequence[Array]) -> Array:
        """See `ArrayOps`."""
        return numpy.concatenate(arrays)

    def difference(self, actual: Array, expected: Array, rtol: float, atol: float) -> tuple[float, bool]:
        """See `ArrayOps`."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return math.inf, False
        wide_dtype = numpy.complex128 if actual.dtype.kind == "c" else numpy.float64
        with numpy.errstate(invalid="ignore"):
            are_equal = (actual == expected) | ((actual != actual) & (expected != expected))
            # Beyond 2**53, float64 does not tell integers apart.
            least = 1.0 if actual.dtype.kind in "iub" else 0.0
            actual, expected = actual.astype(wide_dtype), expected.astype(wide_dtype)
            distance = numpy.where(are_equal, 0.0, numpy.maximum(numpy.abs(actual - expected), least))
            distance = numpy.where(numpy.isnan(distance), math.inf, distance)
            # An infinity is near nothing but itself, though a part of it is infinite too.
            are_close = are_equal | (numpy.isfinite(distance) & (distance <= atol + rtol * numpy.abs(expected)))
        return float(distance.max(initial=0.0)), bool(are_close.all())

    def on_host(self, _: Any) -> bool:
        """See `ArrayOps`."""
        return True

    def to_elements(self, value: Any, dtype: str) -> Array:
        """See `ArrayOps`."""
        if dtype in SCALAR_DTYPES:
            return numpy.array([value], ELEMENT_DTYPES[dtype])
        if not isinstance(value, numpy.ndarray) or value.dtype.name != dtype:
            actual = f"one of {value.dtype.name}" if isinstance(value, numpy.ndarray) else type(value).__name__
            raise InputError(f"expected a numpy array of {dtype}, found {actual}")
        if dtype in COMPLEX_DTYPES:
            value = as_strided(value, (*value.shape, 1), (*value.strides, value.itemsize))
        return numpy.atleast_1d(value.view(ELEMENT_DTYPES[dtype]))

    def device_elements(self, value: Any, dtype: str) -> Any:
        """See `ArrayOps`."""
        return numpy.ascontiguousarray(self.to_elements(value, dtype))

    def takes_device_memory(self, dtype: str) -> bool:
        """See `ArrayOps`."""
        return False

    def from_elements(self, elements: Any, value_type: Value | Edge) -> Any:
        """See `ArrayOps`."""
        array = elements if isinstance(elements, numpy.ndarray) else numpy.from_dlpack(elements)
        if value_type.dtype in SCALAR_DTYPES:
            return array.item()
        array = array.view(numpy_dtype(value_type.dtype))
        if value_type.dtype in COMPLEX_DTYPES:
            array = array[..., 0]
        return array if value_type.shape else array.reshape(())


NUMPY_ARRAYS: Final = NumpyArrays()
