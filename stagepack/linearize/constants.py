"""Constant arguments of operators -> arguments of the format."""

import torch

from stagepack.errors import UnsupportedError
from stagepack.format.codec import is_plain
from stagepack.format.graph import Argument, ComplexArg, DtypeArg, LayoutArg, MemoryFormatArg
from stagepack.linearize.tensor_memory import dtype_name


def constant_argument(constant: object, location: str) -> Argument:
    """Return a constant as data.

    constant: a number, text, bool or None, or a dtype, layout or memory format of torch.
    """
    if is_plain(constant):
        return constant  # type: ignore[return-value]
    match constant:
        case complex():
            return ComplexArg(constant.real, constant.imag)
        case torch.dtype():
            return DtypeArg(dtype_name(constant))
        case torch.layout():
            return LayoutArg(str(constant).removeprefix("torch."))
        case torch.memory_format():
            return MemoryFormatArg(str(constant).removeprefix("torch."))
    description = repr(constant) if isinstance(constant, int | str) else f"a {type(constant).__name__}"
    raise UnsupportedError(f"{location} is {description}, which a bundle cannot hold")
