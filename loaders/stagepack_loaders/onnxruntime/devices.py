"""The devices of ONNX Runtime, by name."""

from dataclasses import dataclass

import onnxruntime

from stagepack.errors import DeviceError

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


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
