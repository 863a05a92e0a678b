"""Values as ONNX Runtime has them, and as callers have them: numpy arrays, torch tensors, numbers. Memory is shared, not copied."""

import sys
from typing import Any, Final

import ml_dtypes
import numpy
from onnxruntime import OrtValue

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.onnx import COMPLEX_PART_DTYPES, ELEMENT_TYPES, SCALAR_TENSOR_DTYPES

_NOT_IN_DLPACK: Final = frozenset(
    name for name in ELEMENT_TYPES if name.startswith("float8")
)  # as onnxruntime reads it


def dtype_of(name: str) -> numpy.dtype[Any]:
    """The numpy dtype of a torch name; those that numpy has not are of ml_dtypes."""
    return numpy.dtype(getattr(ml_dtypes, name) if _is_beyond_numpy(name) else name)


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor. Imports no torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_ort(value: Any, dtype: str, where: str, device: str = "cpu") -> OrtValue:
    """A value of a torch dtype for a stage on a device; on its own memory, if its elements lie one after another there.

    What lies on the host ONNX Runtime moves to the device itself.

    Raises:
        InputError: it is nothing that holds a dense tensor.
    """
    if isinstance(value, OrtValue):
        return value
    if dtype in SCALAR_DTYPES:
        return OrtValue.ortvalue_from_numpy(numpy.array(value, dtype=SCALAR_TENSOR_DTYPES[dtype]))
    if is_torch(value):
        return _from_torch(value, device, where)
    if not isinstance(value, numpy.ndarray):
        raise InputError(f"{where}: expected a numpy array or a torch tensor, found {type(value).__name__}")
    if dtype in COMPLEX_PART_DTYPES:
        value = numpy.stack([value.real, value.imag], axis=-1)
    array = numpy.ascontiguousarray(value).reshape(value.shape)  # the first alone gives a scalar a dimension
    if _is_beyond_numpy(dtype):
        octets = array.view(f"u{array.dtype.itemsize}")
        return OrtValue.ortvalue_from_numpy_with_onnx_type(octets, ELEMENT_TYPES[dtype])
    return OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: Any, dtype: str) -> Any:
    """A value as a numpy array; a number of the host as it is. A value on another device is copied."""
    if is_torch(value):
        value = _from_torch(value, "cpu", "")
    if not isinstance(value, OrtValue):
        return value
    if dtype in SCALAR_DTYPES:
        return value.numpy().item()
    if value.device_name().lower() != "cpu":
        value = OrtValue.ortvalue_from_numpy(value.numpy())
    single = dtype_of(COMPLEX_PART_DTYPES.get(dtype, dtype))
    octets = f"u{single.itemsize}" if _is_beyond_numpy(dtype) else single.str
    array = (
        numpy.asarray(_Memory(value, octets)).view(single)
        if 0 not in value.shape()
        else numpy.empty(value.shape(), single)
    )
    return array.view(dtype_of(dtype))[..., 0] if dtype in COMPLEX_PART_DTYPES else array


def to_torch(value: Any, dtype: str) -> Any:
    """A value as a torch tensor, on its own memory, but a copy of what must not be written; a number of the host as it is."""
    import torch  # noqa: PLC0415 - a host without torch has no use for it

    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):  # torch has no such memory
            value = value.copy()
        if _is_beyond_numpy(dtype):
            return torch.from_numpy(value.view(f"u{value.dtype.itemsize}")).view(getattr(torch, dtype))
        return torch.from_numpy(value)
    if not isinstance(value, OrtValue):
        return value
    if dtype in SCALAR_DTYPES:
        return value.numpy().item()
    if dtype in _NOT_IN_DLPACK:
        return to_torch(to_numpy(value, dtype), dtype)
    tensor: Any = torch.utils.dlpack.from_dlpack(value)
    if dtype == "bool":
        return tensor.view(torch.bool)
    return torch.view_as_complex(tensor) if dtype in COMPLEX_PART_DTYPES else tensor


def _is_beyond_numpy(dtype: str) -> bool:
    return dtype.startswith(("bfloat", "float8"))


def _from_torch(tensor: Any, device: str, where: str) -> OrtValue:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{where}: expected a dense tensor with data, found {tensor.layout} on {tensor.device}")
    tensor = tensor if tensor.device.type == "cpu" else tensor.to(device)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
    if tensor.is_cuda:  # ONNX Runtime has a stream of its own
        torch.cuda.current_stream(tensor.device).synchronize()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _NOT_IN_DLPACK:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.cpu().view(torch.uint8).numpy(), ELEMENT_TYPES[name])
    return OrtValue.from_dlpack(_Booleans(tensor) if tensor.dtype == torch.bool else tensor)


class _Booleans:
    """A tensor of booleans: onnxruntime refuses the type that DLPack has for them, and takes bytes that it is told are booleans."""

    dtype = "bool"

    def __init__(self, tensor: Any) -> None:
        self._octets = tensor.view(sys.modules["torch"].uint8)

    def __dlpack__(self) -> Any:
        return self._octets.__dlpack__()


class _Memory:
    """The memory of a value as numpy takes it, of elements that `octets` names. It keeps the value; an array of it keeps the memory."""

    def __init__(self, value: OrtValue, octets: str) -> None:
        self._value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False),
            "shape": tuple(value.shape()),
            "typestr": numpy.dtype(octets).str,
            "version": 3,
        }
