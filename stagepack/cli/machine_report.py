"""What a report of a bug says of the machine: versions, packages of the extras, devices, limits and the cache. torch may be missing."""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import sys
from typing import Any, Final

from stagepack.cli.output import print_json, print_line, print_table
from stagepack.format.control_groups import cpu_quota, memory_left
from stagepack.format.quantities import format_bytes
from stagepack.remote.cache import default_cache_folder

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+).*;.*extra == ['\"](\w+)['\"]")
# Where processes put the values that they exchange.
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - nothing is written
_NOT_FOR_USERS: Final = ("dev", "docs", "libraries")
# Variables that change what stagepack and its libraries do; none has a secret.
_VARIABLES: Final = re.compile(r"(STAGEPACK|OMP|MKL|CUDA|HF_HUB|NCCL)_\w+|CUBLAS_WORKSPACE_CONFIG|(RANK|WORLD_SIZE)")


def _machine_facts() -> dict[str, Any]:
    return {
        "stagepack": importlib.metadata.version("stagepack"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "extras": _extras(),
        "devices": _devices(),
        "limits": _limits(),
        "cache": str(default_cache_folder()),
        "variables": {
            variable: value for variable, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(variable)
        },
    }


def describe_machine(*, as_json: bool) -> None:
    """Print what is known of this machine."""
    facts = _machine_facts()
    if as_json:
        print_json(facts)
        return
    print_line(f"stagepack {facts['stagepack']}, {facts['python']} ({facts['executable']})")
    print_line(f"{facts['system']}, {facts['processors']} processors")
    rows = [
        [extra, "no" if None in versions.values() else "yes", _described(versions)]
        for extra, versions in facts["extras"].items()
    ]
    print_table("extras", ["extra", "complete", "packages"], rows)
    print_table("devices", ["device", "#memory", "name"], [[*device] for device in facts["devices"]])
    print_table("limits", ["limit", "#value"], [[*limit] for limit in facts["limits"].items()])
    print_line(f"cache of remote bundles: {facts['cache']}")
    for variable, value in facts["variables"].items():
        print_line(f"{variable}={value}")


def _described(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{package} {version or 'MISSING'}" for package, version in versions.items())


def _extras() -> dict[str, dict[str, str | None]]:
    """The version of each package of each extra; None for one that is not installed."""
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in importlib.metadata.requires("stagepack") or ():
        match = _REQUIREMENT.match(requirement)
        if match is not None and match[2] not in _NOT_FOR_USERS and match[1] != "stagepack":
            extras.setdefault(match[2], {})[match[1]] = _version(match[1])
    return extras


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str, str]]:
    """The devices of torch: name, memory, and what it is."""
    memory = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    devices = [("cpu", memory, platform.machine())]
    try:
        import torch  # noqa: PLC0415 - may be missing

        devices += [
            (f"cuda:{index}", format_bytes(properties.total_memory), properties.name)
            for index in range(torch.cuda.device_count())
            for properties in [torch.cuda.get_device_properties(index)]
        ]
        if not torch.cuda.is_available():
            devices.append(
                ("cuda", "-", f"none that torch {torch.__version__} (CUDA {torch.version.cuda or 'no'}) can use")
            )
    except (ImportError, RuntimeError, OSError) as error:
        devices.append(("cuda", "-", f"torch cannot be asked: {' '.join(str(error).split())[:200]}"))
    return devices


def _limits() -> dict[str, str]:
    limits = {
        "open files": _limit(resource.RLIMIT_NOFILE, str),
        "address space": _limit(resource.RLIMIT_AS, format_bytes),
        "locked memory": _limit(resource.RLIMIT_MEMLOCK, format_bytes),
    }
    if (memory := memory_left()) is not None:
        limits["memory left in the control group"] = format_bytes(memory)
    if (quota := cpu_quota()) is not None:
        limits["processors of the control group"] = f"{quota:g}"
    with contextlib.suppress(OSError):
        shared_memory = os.statvfs(_SHARED_MEMORY)
        limits["free shared memory"] = format_bytes(shared_memory.f_bavail * shared_memory.f_frsize)
    return limits


def _limit(kind: int, described: Any) -> str:
    limit, _ = resource.getrlimit(kind)
    return "none" if limit == resource.RLIM_INFINITY else str(described(limit))
