"""Devices of torch, by name: those that the caller names, and those that a graph names."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stagepack.errors import DeviceError, first_line


def parse_device(device: object) -> torch.device:
    """Return the device of a name, with its index if its type has several: ``cuda`` is the current one.

    Raises:
        DeviceError: torch knows no such device, or this machine has none.
    """
    try:
        parsed: torch.device = torch.device(device)  # type: ignore[call-overload]
        if parsed.type not in ("cpu", "meta") and parsed.index is None:
            parsed = torch.device(parsed.type, torch.accelerator.current_device_index())
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"device {str(device)!r}: expected a device of this machine, such as cpu or cuda:0: {reason}"
        ) from None
    return parsed


def parse_graph_device(device: str) -> torch.device:
    """Return a device that a graph names.

    Raises:
        DeviceError: torch knows no such device, this machine has none, or its tensors have no data.
    """
    parsed = parse_device(device)
    if parsed.type == "meta":
        raise DeviceError(
            "the graph makes tensors on the device meta, which have no data: export the model on another device"
        )
    return parsed


def device_type_of(device: str) -> str:
    """Return the type of a device, which this machine need not have.

    Raises:
        DeviceError: torch knows no such device.
    """
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise DeviceError(f"device {device!r}: expected a device of torch: {str(error).splitlines()[0]}") from None


def has_device(device_type: str) -> bool:
    """Return whether this machine has a device of a type."""
    try:
        parse_device(device_type)
    except DeviceError:
        return False
    return True


@contextmanager
def typed_memory_errors() -> Iterator[None]:
    """Raise an error of torch that a device has not enough memory for weights as one of stagepack. Also a decorator.

    Yields:
        Nothing.

    Raises:
        DeviceError: the memory is not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = first_line(error)
        raise DeviceError(
            f"the weights do not fit into the memory of a device: {reason}: choose another device, more devices, or device_memory="
        ) from None
