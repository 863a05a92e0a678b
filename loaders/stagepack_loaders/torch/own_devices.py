"""The devices that this process may use, with what it may use of each: for ``devices="auto"``."""

import torch

from stagepack.format.threads import usable_cpus
from stagepack.partition.profile import DEVICE_PROFILES, DeviceProfile
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.torch.devices import available_host_bytes

# For each processor, without measured times: a core with AVX-512 multiplied float32 matrices at 100 GFLOP/s and read memory at 10 GB/s.
# Others have half of that, and copies from another process take 5 GB/s.
_CORE_FLOPS, _CORE_BANDWIDTH = 50e9, 10e9
_MOST_BANDWIDTH = 200e9
_COPY_BANDWIDTH = 5e9


def own_devices(host: str = "") -> list[TargetDevice]:
    """Return all CUDA devices with their free memory, then the CPU with what the control groups of this process leave to it.

    A GPU that `DEVICE_PROFILES` names has the speed of its data sheet, another one that of the reference device. The CPU has a rough speed
    by the number of its processors. Asking a GPU for its memory takes some hundred MB of it, once for each process.
    """
    gpus = [_gpu(index, host) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, own_cpu(host)]


def own_cpu(host: str = "") -> TargetDevice:
    """Return the CPU with the memory and the processors that this process may use."""
    memory, cores = available_host_bytes(), usable_cpus()
    profile = DeviceProfile(
        name=f"{cores:g} processors of {_CORE_FLOPS / 1e9:g} GFLOP/s and {_CORE_BANDWIDTH / 1e9:g} GB/s",
        flops={"float32": cores * _CORE_FLOPS, "float64": cores * _CORE_FLOPS / 2},
        memory_bandwidth=min(cores * _CORE_BANDWIDTH, _MOST_BANDWIDTH),
        memory=memory,
        link_bandwidth=_COPY_BANDWIDTH,
    )
    return TargetDevice(name="cpu", memory=None if memory >= 2**63 else memory, profile=profile, host=host)


def _gpu(index: int, host: str) -> TargetDevice:
    free_bytes, _ = torch.cuda.mem_get_info(index)
    words = torch.cuda.get_device_name(index).lower().replace("-", " ").split()
    profile = next((DEVICE_PROFILES[word] for word in words if word in DEVICE_PROFILES), None)
    return TargetDevice(name=f"cuda:{index}", memory=free_bytes, profile=profile, host=host)
