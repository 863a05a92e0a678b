"""Which stage goes on which device."""

from collections.abc import Sequence
from typing import TypeVar

from stagepack.errors import DeviceError

Device = TypeVar("Device")


def place(weight_bytes: Sequence[int], devices: Sequence[Device]) -> list[Device]:
    """One device a stage; with fewer devices than stages, consecutive stages share one, by weight bytes.

    Raises:
        DeviceError: no device, or more devices than stages.
    """
    stages = len(weight_bytes)
    if not 1 <= len(devices) <= stages:
        raise DeviceError(f"expected 1 to {stages} devices for {stages} stages, found {len(devices)}")
    placed: list[Device] = []
    left = sum(weight_bytes)
    held = 0
    current = 0
    for number, size in enumerate(weight_bytes):
        stages_left, devices_left = stages - number, len(devices) - current
        full = held + size / 2 > left / devices_left
        if placed and placed[-1] is devices[current] and devices_left > 1 and (full or stages_left < devices_left):
            left -= held
            held = 0
            current += 1
        placed.append(devices[current])
        held += size
    return placed
