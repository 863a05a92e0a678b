"""What a process may use of its machine: processors and memory within its control groups, and GPUs."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stagepack.format import threads
from stagepack.format.control_groups import cpu_quota, memory_left
from stagepack.partition.profile import DEVICE_PROFILES, DeviceProfile
from stagepack_loaders.torch import devices
from stagepack_loaders.torch.own_devices import own_cpu, own_devices

GIB = 2**30
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def make_tree(root: Path, *, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """A tree of files as the kernel shows it."""
    for name, content in {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_limits_of_version_2_hold_from_the_own_group_to_the_outermost(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pods/one"
    root = make_tree(
        tmp_path,
        mounts=V2_MOUNT,
        groups="0::/pods/one\n",
        files={
            f"{group}/memory.max": "max\n",
            f"{group}/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pods/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pods/memory.current": f"{3 * GIB}\n",
            # Pages of files go when memory is asked for; those of shared memory stay.
            "sys/fs/cgroup/pods/memory.stat": f"anon 1\nfile {2 * GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}\n",
            "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
        },
    )
    assert memory_left(root) == 4 * GIB - 3 * GIB + GIB + GIB // 2
    assert cpu_quota(root) == 1.5


def test_limits_of_version_1_are_seen_in_their_hierarchies(tmp_path: Path) -> None:
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/job", "sys/fs/cgroup/memory/job"
    root = make_tree(
        tmp_path,
        mounts=V1_MOUNTS,
        groups="9:name=systemd:/\n4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        files={
            f"{cpu}/cpu.cfs_quota_us": "50000\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
            f"{memory}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{memory}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{memory}/memory.stat": "total_active_file 0\ntotal_inactive_file 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert memory_left(root) == 0  # no less, where more is in use than a new limit allows
    assert cpu_quota(root) == 0.5


@pytest.mark.parametrize("path", ["/docker/abc", "/elsewhere"])
def test_a_container_without_a_namespace_sees_its_own_group_at_the_mount(path: str, tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        mounts="35 31 0:32 /docker/abc /sys/fs/my\\040groups ro - cgroup cgroup rw,memory\n",
        groups=f"4:memory:{path}\n",
        files={
            "sys/fs/my groups/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/my groups/memory.usage_in_bytes": "1000\n",
        },
    )
    assert memory_left(root) == GIB - 1000


@pytest.mark.parametrize(
    ("mounts", "groups", "files"),
    [
        ("", "", {}),
        ("no mounts\n", "0::/\n", {}),
        (V2_MOUNT, "0::/\n", {}),
        (V2_MOUNT, "0::/\n", {"sys/fs/cgroup/cpu.max": "much\n", "sys/fs/cgroup/memory.max": "more\n"}),
        (V1_MOUNTS, "2:cpu:/\n", {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}),
        (V2_MOUNT, "0::/\n", {"sys/fs/cgroup/cpu.max": "100 0\n"}),
    ],
)
def test_a_system_that_states_no_limit_has_none(
    mounts: str, groups: str, files: dict[str, str], tmp_path: Path
) -> None:
    root = make_tree(tmp_path, mounts=mounts, groups=groups, files=files)
    assert memory_left(root) is None
    assert cpu_quota(root) is None


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (0.2, 1), (1.5, 2), (64.0, 8)])
def test_threads_are_as_many_as_a_quota_allows(
    quota: float | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    threads._own_quota.cache_clear()
    try:
        assert threads.usable_cpu_count() == count
    finally:
        threads._own_quota.cache_clear()


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no sets of processors")
def test_a_process_on_one_processor_counts_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from stagepack.format.threads import usable_cpu_count; print(usable_cpu_count())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_parts_of_processors_count_as_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    profiles = []
    for quota in (0.5, 1.5, None):
        monkeypatch.setattr(threads, "cpu_quota", lambda quota=quota: quota)
        threads._own_quota.cache_clear()
        profiles.append(own_cpu().profile)
    threads._own_quota.cache_clear()
    half, larger, whole = profiles
    assert isinstance(half, DeviceProfile)
    assert isinstance(larger, DeviceProfile)
    assert isinstance(whole, DeviceProfile)
    assert larger.flops["float32"] == 3 * half.flops["float32"] == whole.flops["float32"] * 3 / 16
    assert larger.memory_bandwidth == 3 * half.memory_bandwidth
    assert half.name.startswith("0.5 processors")


def test_the_cpu_has_the_memory_that_its_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_left", lambda: 123_456)
    cpu = own_cpu("a")
    assert (cpu.name, cpu.host, cpu.memory_limit) == ("cpu", "a", 123_456)
    assert [str(device) for device in own_devices()][-1] == "cpu"


def test_all_gpus_are_found_with_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 9999"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((index + 1) * GIB, 80 * GIB))
    found = own_devices()
    assert [device.name for device in found] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert [device.memory_limit for device in found[:3]] == [GIB, 2 * GIB, 3 * GIB]
    assert [device.profile for device in found[:3]] == [DEVICE_PROFILES["h100"], DEVICE_PROFILES["a100"], None]
    assert math.isfinite(found[3].profile.memory_bandwidth)  # type: ignore[union-attr]
