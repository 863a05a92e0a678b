"""The limits of the control groups of this process (cgroup v1, v2 and both), as containers and services have them."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# v1 states no limit by the largest number of pages.
_NO_LIMIT = 2**62


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take by its control groups, at least 0; None without a limit.

    Clean pages of files count as free: the system takes them back.
    """
    found = []
    for group in _groups("memory", root):
        for limit_name, usage_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with suppress(OSError, ValueError):  # "max" without a limit, no such file in the other version
                limit = int((group / limit_name).read_text())
                if limit < _NO_LIMIT:
                    usage = int((group / usage_name).read_text())
                    found.append(max(0, limit - usage + _file_pages(group, prefix)))
    return min(found, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors this process may use at a time by its control groups, such as 1.5; None without a limit."""
    found = []
    for group in _groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (group / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = ((group / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
            found.append(int(quota) / int(period))
    return min((processors for processors in found if processors > 0), default=None)


def _file_pages(group: Path, prefix: str) -> int:
    """The bytes of the pages of files that a group counts; those of shared memory are not among them."""
    with suppress(OSError):
        statistics = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(statistics.get(f"{prefix}{kind}", 0)) for kind in ("active_file", "inactive_file"))
    return 0


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process, from its own one up to the outermost that it sees."""
    with suppress(OSError, ValueError):
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            found = _mount_of(mounts, None if number == "0" else controller)
            if found is None:
                continue
            mount_root, mount_point = found
            folder = root / mount_point.lstrip("/")
            # A container may see the path that the host has, of which its own group is the root of what is mounted.
            inner = os.path.relpath(path, mount_root)
            parts = [] if inner.startswith("..") else [part for part in inner.split("/") if part != "."]
            for depth in range(len(parts), -1, -1):
                yield folder.joinpath(*parts[:depth])


def _mount_of(mounts: list[str], controller: str | None) -> tuple[str, str] | None:
    """The root within its hierarchy and the mount point of a controller of version 1; of version 2 for None."""
    for line in mounts:
        fields, _, kind = line.partition(" - ")
        file_system, _, options = kind.split(" ", 2)
        is_wanted = (
            file_system == "cgroup2"
            if controller is None
            else file_system == "cgroup" and controller in options.split(" ")[-1].split(",")
        )
        if is_wanted:
            mount_root, mount_point = (_unescaped(field) for field in fields.split(" ")[3:5])
            return mount_root, mount_point
    return None


def _unescaped(field: str) -> str:
    """A path of a table of mounts, which has a space as an octal escape."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
