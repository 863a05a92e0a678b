"""The datatypes of the protocol, and the dtypes of torch that they carry.

Source: section "Tensor Data Types" of the protocol. BF16 is an addition of Triton.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy

from stagepack.errors import UnsupportedError

# Datatype of the protocol -> numpy dtype of its elements. A BF16 element is represented by its 16 bits.
NUMPY_DTYPES: Final[Mapping[str, numpy.dtype[Any]]] = MappingProxyType(
    {
        datatype: numpy.dtype(typecode)
        for datatype, typecode in {
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

# Dtype of torch -> datatype of the protocol. A complex number is a pair of floats, a symbolic scalar a tensor of one element.
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


def protocol_datatype(dtype: str) -> str:
    """Return the datatype of the protocol that carries a dtype of the format. It has no 8-bit floats: they travel as UINT8."""
    if dtype.startswith("float8"):
        return "UINT8"
    if dtype not in _DATATYPES:
        raise UnsupportedError(
            f"the Open Inference Protocol has no datatype for {dtype[:80]}: change the inputs and results of the model"
        )
    return _DATATYPES[dtype]
