"""The elements of a value: a numpy array of a plain type, in which form values cross between runtimes, processes and hosts.

The array is little-endian. A dtype that numpy lacks is its bits as unsigned integers; a complex number is a pair of floats, in a last
dimension of size 2; a Python number or a tensor without dimensions is an array of one element.
"""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy

from stagepack.errors import MissingPackageError
from stagepack.format.dtypes import ITEM_SIZE

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
