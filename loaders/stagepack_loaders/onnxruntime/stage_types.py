"""What a bundle states of the inputs and outputs of a session: checked at each call, and an answer where nothing is to be computed.

- The devices of ONNX Runtime, by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnxruntime
from onnxruntime import OrtValue

from stagepack.errors import DeviceError, StageFailedError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.onnx import COMPLEX_PART_DTYPES, ELEMENT_TYPES
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack_loaders.onnxruntime.values import to_numpy
from stagepack_loaders.output_contract import OutputContract

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Operators with which ONNX Runtime 1.31 and 1.32 end the process by SIGABRT or SIGFPE where they get a tensor without elements: found by
# running the 1,884 models of ONNX's own tests with each size set to 0.
ENDS_PROCESS_WITHOUT_ELEMENTS: Final = frozenset({"GRU", "LSTM", "STFT", "Unique"})
_DTYPE_NAMES: Final = {element_type: dtype for dtype, element_type in ELEMENT_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU, or a CUDA device with its index."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def parse_device(device: object) -> Device:
    """Return the device of a name: ``cpu``, ``cuda``, ``cuda:1``."""
    device_type, _, index = str(device).partition(":")
    is_known = device_type in PROVIDERS and (not index or index.isdecimal())
    if not is_known or (device_type == "cpu" and int(index or 0)):
        raise DeviceError(f"device {str(device)!r}: ONNX Runtime runs stages on cpu, cuda or cuda:N")
    if PROVIDERS[device_type] not in onnxruntime.get_available_providers():
        raise DeviceError(
            f"device {str(device)!r}: this onnxruntime has no {PROVIDERS[device_type]}: install onnxruntime-gpu in its place"
        )
    return Device(device_type, int(index or 0))


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

    def outputs_without_elements(self, described_inputs: Sequence[Any], device: Device) -> tuple[Any, ...] | None:
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


def _empty_value(dtype: str, shape: Sequence[int], device: Device) -> OrtValue:
    """A value without elements, on a device."""
    is_complex = dtype in COMPLEX_PART_DTYPES
    element_type = ELEMENT_TYPES[COMPLEX_PART_DTYPES.get(dtype, dtype)]
    sizes = [*shape, 2] if is_complex else list(shape)
    return OrtValue.ortvalue_from_shape_and_type(sizes, element_type, device.type, device.index)
