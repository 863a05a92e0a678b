"""Which file system a file is on, as far as that says what changes of the file the kernel tells."""

import os
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

_MOUNTS_PATH: Final = Path("/proc/self/mountinfo")


def is_of_kind(device: int, kinds: AbstractSet[str]) -> bool:
    """Whether a device has a file system of some kinds, and is not an image that a file holds. False where the kernel does not tell."""
    device_name = f"{os.major(device)}:{os.minor(device)}"
    try:
        if Path(f"/sys/dev/block/{device_name}/loop").exists():
            return False
        mounts = [line.split() for line in _MOUNTS_PATH.read_text().splitlines()]
    except OSError:
        return False
    mounted_kinds = {fields[fields.index("-") + 1] for fields in mounts if fields[2] == device_name and "-" in fields}
    return bool(mounted_kinds) and mounted_kinds <= kinds
