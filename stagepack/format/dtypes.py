"""Data types: their names in torch and in safetensors headers, and their sizes in bytes (SPEC W4)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# dtype in a safetensors header -> (torch dtype, bytes per element)
_HEADER_DTYPES: Final = {
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
# torch dtypes without a name in safetensors headers -> bytes per element. They are stored as `U8`.
STORED_AS_BYTES: Final = {"complex128": 16, "complex32": 4}
# torch dtype -> bytes per element
ITEM_SIZE: Final[Mapping[str, int]] = MappingProxyType(
    {torch_dtype: size for torch_dtype, size in _HEADER_DTYPES.values()} | STORED_AS_BYTES
)
# torch dtype -> dtype in a safetensors header
HEADER_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {torch_dtype: header_dtype for header_dtype, (torch_dtype, _) in _HEADER_DTYPES.items()}
    | dict.fromkeys(STORED_AS_BYTES, "U8")
)
# dtype in a safetensors header -> bytes per element
HEADER_ITEM_SIZE: Final[Mapping[str, int]] = MappingProxyType(
    {header_dtype: size for header_dtype, (_, size) in _HEADER_DTYPES.items()}
)
# dtype in a safetensors header -> torch dtype. A tensor that is stored as bytes has the dtype uint8.
TORCH_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {header_dtype: torch_dtype for header_dtype, (torch_dtype, _) in _HEADER_DTYPES.items()}
)
# The dtypes of symbolic scalars, which cross edges as Python numbers and not as tensors.
SCALAR_DTYPES: Final = frozenset({"symint", "symfloat", "symbool"})


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a safetensors header gives for a tensor."""
    if dtype not in STORED_AS_BYTES:
        return shape
    return (*shape[:-1], shape[-1] * ITEM_SIZE[dtype]) if shape else (ITEM_SIZE[dtype],)
