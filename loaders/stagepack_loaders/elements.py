"""The elements of a value: a numpy array of a plain type, in which form values cross between runtimes, processes and hosts.

The array is little-endian. A dtype that numpy lacks is its bits as unsigned integers; a complex number is a pair of floats, in a last
dimension of size 2; a Python number or a tensor without dimensions is an array of one element.

- `NumpyArrays`: the operations on numpy arrays of a runtime whose stages take these. Dtypes that numpy lacks, such as bfloat16, are those
  of ml_dtypes.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy
from numpy.lib.stride_tricks import as_strided
from safetensors import deserialize
from safetensors.numpy import save_file

from stagepack.errors import InputError, MissingPackageError
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES, TORCH_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge

# An array of elements.
Array = numpy.ndarray[Any, Any]

COMPLEX_DTYPES: Final = frozenset({"complex32", "complex64", "complex128"})

# torch dtype, or the dtype of a symbolic scalar -> the numpy dtype of its elements.
ELEMENT_DTYPES: Final[Mapping[str, numpy.dtype[Any]]] = MappingProxyType(
    {
        "bool": numpy.dtype("?"),
        "bfloat16": numpy.dtype("<u2"),
        "complex32": numpy.dtype("<f2"),
        "complex64": numpy.dtype("<f4"),
        "complex128": numpy.dtype("<f8"),
        "symint": numpy.dtype("<i8"),
        "symfloat": numpy.dtype("<f8"),
        "symbool": numpy.dtype("?"),
    }
    | {f"float{8 * size}": numpy.dtype(f"<f{size}") for size in (2, 4, 8)}
    | {f"{sign}int{8 * size}": numpy.dtype(f"<{sign or 'i'}{size}") for sign in ("", "u") for size in (1, 2, 4, 8)}
    | {dtype: numpy.dtype("<u1") for dtype in ITEM_SIZE if dtype.startswith("float8")}
)


def numpy_dtype(dtype: str) -> numpy.dtype[Any]:
    """Return the numpy dtype of a torch name, such as ``float32`` or ``bfloat16``."""
    if not is_extension_dtype(dtype):
        return numpy.dtype(dtype)
    try:
        extension_types = importlib.import_module("ml_dtypes")
    except ModuleNotFoundError:
        message = f"numpy has no dtype {dtype}: pip install ml_dtypes installs it"
        raise MissingPackageError(message, name="ml_dtypes") from None
    extension_dtype: numpy.dtype[Any] = numpy.dtype(getattr(extension_types, dtype))
    return extension_dtype


def is_extension_dtype(dtype: str) -> bool:
    """Whether numpy lacks a dtype that ml_dtypes has."""
    return dtype.startswith(("bfloat", "float8"))


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
