"""Values of ONNX Runtime: from and to numpy arrays and Python numbers, and compared with what a bundle states of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import onnxruntime
from onnxruntime import OrtValue

from stagepack.errors import DeviceError, InputError, StageFailedError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.onnx import COMPLEX_PART_DTYPES, ELEMENT_TYPES, SCALAR_TENSOR_DTYPES
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack_loaders.elements import Array, is_extension_dtype, numpy_dtype
from stagepack_loaders.exchange import check_shared_memory
from stagepack_loaders.stages import OutputContract

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Operators with which ONNX Runtime 1.31 and 1.32 end the process by SIGABRT or SIGFPE where they get a tensor without elements: found by
# running the 1,884 models of ONNX's own tests with each size set to 0.
ENDS_PROCESS_WITHOUT_ELEMENTS: Final = frozenset({"GRU", "LSTM", "STFT", "Unique"})
_DTYPE_NAMES: Final = {element_type: dtype for dtype, element_type in ELEMENT_TYPES.items()}


def to_ort(value: Any, dtype: str) -> OrtValue:
    """Return a value of ONNX Runtime for an array or a number, on the array's memory if that is contiguous."""
    if isinstance(value, OrtValue):
        return value
    if dtype in SCALAR_DTYPES:
        return OrtValue.ortvalue_from_numpy(numpy.array(value, dtype=SCALAR_TENSOR_DTYPES[dtype]))
    if dtype in COMPLEX_PART_DTYPES:
        value = numpy.stack([value.real, value.imag], axis=-1)
    array = numpy.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray gives a scalar a dimension
    if is_extension_dtype(dtype):
        bits = array.view(f"u{array.dtype.itemsize}")
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENT_TYPES[dtype])
    return OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: OrtValue, dtype: str) -> Any:
    """Return a value of ONNX Runtime as a numpy array, on its memory if that is the host's; one of a symbolic scalar as a Python number."""
    if dtype in SCALAR_DTYPES:
        return value.numpy().item()
    array = _host_array(value, numpy_dtype(COMPLEX_PART_DTYPES.get(dtype, dtype)))
    return array.view(numpy_dtype(dtype))[..., 0] if dtype in COMPLEX_PART_DTYPES else array


def is_on_host(value: OrtValue) -> bool:
    """Whether the memory of a value is memory of the host."""
    return bool(value.device_name().lower() == "cpu")


def to_host(value: OrtValue) -> OrtValue:
    """Return a value in the memory of the host: itself, or a copy."""
    return value if is_on_host(value) else OrtValue.ortvalue_from_numpy(value.numpy())


def _host_array(value: OrtValue, dtype: numpy.dtype[Any]) -> Array:
    value = to_host(value)
    if 0 in value.shape():
        return numpy.empty(value.shape(), dtype)
    plain_dtype = f"u{dtype.itemsize}" if is_extension_dtype(dtype.name) else dtype.str
    return numpy.asarray(_Memory(value, plain_dtype)).view(dtype)


class _Memory:
    """The memory of a value, for numpy. It keeps the value alive; an array of it keeps the memory alive."""

    def __init__(self, value: OrtValue, dtype: str) -> None:
        self._value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False),
            "shape": tuple(value.shape()),
            "typestr": numpy.dtype(dtype).str,
            "version": 3,
        }


def check_written_inputs(inputs: Mapping[str, Any], written_names: Collection[str]) -> None:
    """Check inputs before a call that writes some of them."""
    for edge_name in written_names:
        if not _is_writeable(inputs[edge_name]):
            raise InputError(f"{edge_name}: the model writes into this input, and it cannot be written: give a copy")
    check_shared_memory(
        {name: value for name, value in inputs.items() if isinstance(value, numpy.ndarray)}, written_names
    )


def write_input(value: Any, content: OrtValue, dtype: str) -> None:
    """Write the new content of an input into its memory."""
    if isinstance(value, numpy.ndarray):
        numpy.copyto(value, to_numpy(content, dtype))


def _is_writeable(value: Any) -> bool:
    return not isinstance(value, numpy.ndarray) or (
        value.flags.writeable and not _elements_overlap(value.shape, value.strides)
    )


def _elements_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    # numpy gives arrays without elements strides of 0.
    return 0 not in shape and any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class ProviderDevice:
    """The CPU, or a CUDA device with its index."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def parse_provider_device(device: object) -> ProviderDevice:
    """Return the device of a name: ``cpu``, ``cuda``, ``cuda:1``."""
    device_type, _, index = str(device).partition(":")
    is_known = device_type in PROVIDERS and (not index or index.isdecimal())
    if not is_known or (device_type == "cpu" and int(index or 0)):
        raise DeviceError(f"device {str(device)!r}: ONNX Runtime runs stages on cpu, cuda or cuda:N")
    if PROVIDERS[device_type] not in onnxruntime.get_available_providers():
        raise DeviceError(
            f"device {str(device)!r}: this onnxruntime has no {PROVIDERS[device_type]}: install onnxruntime-gpu in its place"
        )
    return ProviderDevice(device_type, int(index or 0))


class DescribedValue:
    """The shape of a value of ONNX Runtime and the torch name of its dtype, which nobody has to read it for."""

    __slots__ = ("dtype", "shape")

    def __init__(self, value: OrtValue, dtype: str) -> None:
        self.shape = tuple(value.shape())
        self.dtype = _DTYPE_NAMES.get(value.element_type(), "unknown")
        if COMPLEX_PART_DTYPES.get(dtype) == self.dtype and self.shape[-1:] == (2,):
            self.dtype, self.shape = dtype, self.shape[:-1]


class SessionTypes:
    """The inputs and outputs of a session, as the bundle states them."""

    def __init__(
        self,
        inputs: Sequence[Edge],
        outputs: Sequence[Edge],
        further_outputs: Sequence[Value],
        symbols: Sequence[Symbol],
    ) -> None:
        self._inputs = inputs
        self._outputs: list[Value | Edge] = [*outputs, *further_outputs]
        self._contract = OutputContract(inputs, self._outputs, symbols)

    def describe_inputs(self, values: Sequence[Any]) -> list[Any]:
        """Return objects with a shape and a dtype for the inputs of a call, and numbers as they are."""
        return [
            DescribedValue(value, edge.dtype) if isinstance(value, OrtValue) else value
            for value, edge in zip(values, self._inputs, strict=True)
        ]

    def outputs_without_elements(
        self, described_inputs: Sequence[Any], device: ProviderDevice
    ) -> tuple[Any, ...] | None:
        """Return the outputs of a call if their shapes are all that is to know of them: none has an element."""
        if all(0 not in getattr(value, "shape", ()) for value in described_inputs):
            return None
        bound = {
            edge.name: BoundArgument(edge.name, value)
            for edge, value in zip(self._inputs, described_inputs, strict=True)
        }
        sizes = check_values(self._inputs, bound, ())
        outputs: list[Any] = []
        for stated in self._outputs:
            try:
                dims = (stated.expr,) if stated.dtype in SCALAR_DTYPES else stated.shape
                shape = [evaluate_dim(dim, sizes) for dim in dims if dim is not None]
            except (KeyError, ArithmeticError):
                return None
            if stated.dtype in SCALAR_DTYPES:
                outputs += shape
            elif min(shape, default=1) == 0:
                outputs.append(_empty_value(stated.dtype, shape, device))
        return tuple(outputs) if len(outputs) == len(self._outputs) else None

    def checked_outputs(self, described_inputs: Sequence[Any], output_values: Sequence[OrtValue]) -> list[Any]:
        """Return what a session returned, with numbers in the place of symbolic scalars."""
        described = [
            DescribedValue(value, stated.dtype) for value, stated in zip(output_values, self._outputs, strict=True)
        ]
        outputs = [
            to_numpy(value, stated.dtype) if stated.dtype in SCALAR_DTYPES and not types.shape else value
            for value, stated, types in zip(output_values, self._outputs, described, strict=True)
        ]
        self._contract.check(
            described_inputs,
            [types if isinstance(value, OrtValue) else value for value, types in zip(outputs, described, strict=True)],
        )
        return outputs


def check_operators(operators: Sequence[str], described_inputs: Sequence[Any], stage_number: int) -> None:
    """Check inputs before a session runs."""
    if operators and any(0 in getattr(value, "shape", ()) for value in described_inputs):
        raise StageFailedError(
            f"stage {stage_number}: expected inputs with elements, found one without: ONNX Runtime ends the process if "
            f"{', '.join(operators)} gets none: run the stage in torch, or write its ONNX model again (stagepack onnx)"
        )


def _empty_value(dtype: str, shape: Sequence[int], device: ProviderDevice) -> OrtValue:
    """A value without elements, on a device."""
    is_complex = dtype in COMPLEX_PART_DTYPES
    element_type = ELEMENT_TYPES[COMPLEX_PART_DTYPES.get(dtype, dtype)]
    sizes = [*shape, 2] if is_complex else list(shape)
    return OrtValue.ortvalue_from_shape_and_type(sizes, element_type, device.type, device.index)
