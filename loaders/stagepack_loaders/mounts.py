"""The kinds of the file systems that devices have, as the kernel lists them."""

import contextlib
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from pathlib import Path
from typing import Final

_MOUNTS_PATH: Final = Path("/proc/self/mountinfo")
# The file systems of devices on which this thread has files open, by their numbers; None outside of `devices_asked_once`.
_mounted_kinds: ContextVar[dict[int, frozenset[str]] | None] = ContextVar("_mounted_kinds", default=None)


@contextlib.contextmanager
def devices_asked_once() -> Iterator[None]:
    """Have `is_of_kind` ask the kernel once for each device, of which a file must stay open meanwhile: no other one gets its number."""
    token = _mounted_kinds.set({})
    try:
        yield
    finally:
        _mounted_kinds.reset(token)


def is_of_kind(device: int, kinds: AbstractSet[str]) -> bool:
    """Whether a device has a file system of some kinds, and is not an image that a file holds. False where the kernel does not tell."""
    known = _mounted_kinds.get()
    mounted_kinds = _kinds_of(device) if known is None or device not in known else known[device]
    if known is not None:
        known[device] = mounted_kinds
    return bool(mounted_kinds) and mounted_kinds <= kinds


def _kinds_of(device: int) -> frozenset[str]:
    """The kinds of the file systems of a device; none for an image that a file holds, and where the kernel does not tell."""
    device_name = f"{os.major(device)}:{os.minor(device)}"
    try:
        if Path(f"/sys/dev/block/{device_name}/loop").exists():
            return frozenset()
        lines = _MOUNTS_PATH.read_text().splitlines()
    except OSError:
        return frozenset()
    mounts = [line.split() for line in lines if device_name in line]
    return frozenset(fields[fields.index("-") + 1] for fields in mounts if fields[2] == device_name and "-" in fields)
