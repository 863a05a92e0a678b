"""The datatypes of the protocol, and the dtypes of torch that they stand for.

Source: section "Tensor Data Types" of the protocol; BF16 is Triton's addition.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy

# Datatype of the protocol -> the numpy dtype of its elements. A BF16 is its 16 bits.
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

# Complex numbers travel as pairs of floats, Python numbers as tensors of one element.
_DATATYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "BOOL",
        "float16": "FP16",
        "float32": "FP32",
        "float64": "FP64",
        "bfloat16": "BF16",
        "complex32": "FP16",
        "complex64": "FP32",
        "complex128": "FP64",
        "symint": "INT64",
        "symfloat": "FP64",
        "symbool": "BOOL",
    }
    | {f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)


def datatype_of(dtype: str) -> str:
    """The protocol's datatype for a dtype of torch; 8-bit floats, which it lacks, travel as their bits."""
    return "UINT8" if dtype.startswith("float8") else _DATATYPES[dtype]
