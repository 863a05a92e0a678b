"""Devices of torch, by name: those that the caller names, and those that a graph names."""

import errno
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from stagepack.errors import DeviceError, first_line
from stagepack.format.control_groups import memory_left
from stagepack.format.graph import Weight
from stagepack.format.quantities import format_bytes


def parse_device(device: object) -> torch.device:
    """Return the device of a name, with its index if its type has several: ``cuda`` is the current one."""
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
    """Return a device that a graph names."""
    parsed = parse_device(device)
    if parsed.type == "meta":
        raise DeviceError(
            "the graph makes tensors on the device meta, which have no data: export the model on another device"
        )
    return parsed


def device_type_of(device: str) -> str:
    """Return the type of a device, which this machine need not have."""
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


class ZeroMemory:
    """The memory of the host for weights of zeros of the stages that are loaded together.

    No file has them, so that a bundle of 3 kB may state any number of them; and the system gives such memory out before it has it, and
    ends the process when calls write to it.
    """

    def __init__(self) -> None:
        self._byte_count = 0

    def reserve(self, weights: Iterable[Weight], device: torch.device) -> None:
        """Count the weights of a stage."""
        if device.type != "cpu":
            return
        self._byte_count += sum(weight.zero_bytes for weight in weights)
        # Small ones need no look at the host, which takes 50 µs.
        if self._byte_count > 2**26 and self._byte_count > (available_bytes := available_host_bytes()):
            raise DeviceError(
                f"caches and other buffers of zeros do not fit into the memory of this host: expected {format_bytes(available_bytes)} "
                f"at most, found {format_bytes(self._byte_count)}: choose another device, fewer stages in one process, or a smaller "
                "cache (--generate, --generate-batch)"
            )


def available_host_bytes() -> int:
    """Return the memory of the host that this process may still take, in bytes: 2**63 where the system does not tell."""
    limits = [2**63]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024)
    if (memory := memory_left()) is not None:
        limits.append(memory)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(*limits, limit if limit != resource.RLIM_INFINITY else 2**63)


@contextmanager
def typed_memory_errors() -> Iterator[None]:
    """Raise an error of torch that a device has not enough memory for weights as one of stagepack. Also a decorator."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        # The allocator of the host raises no error of a type of its own.
        is_memory_error = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(
            error
        )
        if not is_memory_error and getattr(error, "errno", None) != errno.ENOMEM:
            raise
        reason = first_line(error) or "no memory"
        raise DeviceError(
            f"the weights and buffers do not fit into the memory of a device: {reason}: choose another device, more devices, or "
            "device_memory="
        ) from None
