"""Data types: torch's name, the name in a safetensors header, and bytes per element (SPEC W4)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# safetensors header name -> (torch name, bytes per element)
_STORED: Final = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}
# torch dtypes without a safetensors name: stored as bytes, `U8`, with the last dimension multiplied by the size.
_AS_BYTES: Final = {"complex128": 16, "complex32": 4}

ITEM_SIZE: Final[Mapping[str, int]] = MappingProxyType({name: size for name, size in _STORED.values()} | _AS_BYTES)
HEADER_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {name: stored for stored, (name, _) in _STORED.items()} | dict.fromkeys(_AS_BYTES, "U8")
)
HEADER_ITEM_SIZE: Final[Mapping[str, int]] = MappingProxyType({stored: size for stored, (_, size) in _STORED.items()})

# The torch name of what a header names; a tensor that is stored as bytes is of bytes.
TORCH_DTYPES: Final[Mapping[str, str]] = MappingProxyType({stored: name for stored, (name, _) in _STORED.items()})

# Symbolic scalars travel as Python numbers, not as tensors.
SCALAR_DTYPES: Final = frozenset({"symint", "symfloat", "symbool"})


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a tensor lies in its file: its own, but bytes for a dtype without a stored name."""
    if dtype not in _AS_BYTES:
        return shape
    return (*shape[:-1], shape[-1] * ITEM_SIZE[dtype]) if shape else (ITEM_SIZE[dtype],)
