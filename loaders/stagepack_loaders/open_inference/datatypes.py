"""The types of the protocol, and how the elements of a torch type travel: little-endian, row by row.

Source: section "Tensor Data Types" of the protocol; BF16 is Triton's addition.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy

# Elements as they travel.
Array = numpy.ndarray[Any, Any]

# Datatype of the protocol -> what numpy reads its elements as. A BF16 is read as its 16 bits.
ELEMENTS: Final[Mapping[str, numpy.dtype[Any]]] = MappingProxyType(
    {
        name: numpy.dtype(element)
        for name, element in {
            "BOOL": "?",
            "UINT8": "<u1",
            "UINT16": "<u2",
            "UINT32": "<u4",
            "UINT64": "<u8",
            "INT8": "<i1",
            "INT16": "<i2",
            "INT32": "<i4",
            "INT64": "<i8",
            "FP16": "<f2",
            "FP32": "<f4",
            "FP64": "<f8",
            "BF16": "<u2",
        }.items()
    }
)

# Complex numbers travel as pairs: the type of their parts.
PAIRS: Final[Mapping[str, str]] = MappingProxyType({"complex32": "FP16", "complex64": "FP32", "complex128": "FP64"})

# Python numbers travel as tensors of one element.
NUMBERS: Final[Mapping[str, str]] = MappingProxyType({"symint": "INT64", "symfloat": "FP64", "symbool": "BOOL"})

_SAME: Final = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
} | {f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


def datatype_of(dtype: str) -> str:
    """The protocol's type for a torch type. It has none for the floats of 8 bits, which travel as their bits."""
    if dtype.startswith("float8"):
        return "UINT8"
    return _SAME.get(dtype) or PAIRS.get(dtype) or NUMBERS[dtype]


def elements_of(dtype: str) -> numpy.dtype[Any]:
    """What numpy reads the elements of a torch type as, when they travel."""
    return ELEMENTS[datatype_of(dtype)]
