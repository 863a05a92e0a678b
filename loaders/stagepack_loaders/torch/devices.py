"""Devices by name: of the caller, and of a graph whose author named one on purpose."""

import torch

from stagepack.errors import DeviceError


def parse_device(device: str | torch.device) -> torch.device:
    """A device by its name, with its number where its type has numbers: ``cuda`` is the current one.

    Raises:
        DeviceError: torch knows no such device, or this machine has none.
    """
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "meta") and found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"device {str(device)!r}: expected a device of this machine, such as cpu or cuda:0: {reason}"
        ) from None
    return found
