"""What a process may use of its machine: processors and memory within its control groups, and GPUs."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import StageLostError
from stagepack.format import threads
from stagepack.format.control_groups import cpu_quota, memory_left
from stagepack.format.reader import Bundle
from stagepack.partition.profile import DEVICE_PROFILES, DeviceProfile
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.distributed.membership import GroupOptions
from stagepack_loaders.distributed.process_launcher import ProcessGrouping
from stagepack_loaders.options import LoadOptions, PlacementOptions, ProcessOptions
from stagepack_loaders.placement import place_bundle
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


def test_processes_of_one_host_share_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_left", lambda: 3 * GIB)
    bundle = chain(tmp_path)
    placed = place_bundle(bundle, LoadOptions(devices=["auto"], placement=counts(2, 1, 1)), 3)
    assert placed.chosen is not None
    cpus = [part.device for part in placed.chosen.parts]
    assert [cpu.memory_limit for cpu in cpus] == [GIB] * 3
    assert sum(cpu.speed for cpu in cpus) == pytest.approx(1)
    # One process of another host has the whole of it.
    hosts = [own_cpu("a"), own_cpu("a"), own_cpu("b")]
    placed = place_bundle(bundle, LoadOptions(devices=["auto"], placement=counts(2, 1, 1)), 3, hosts)
    assert placed.chosen is not None
    assert [part.device.memory_limit for part in placed.chosen.parts] == [3 * GIB // 2, 3 * GIB // 2, 3 * GIB]
    assert [part.device.speed for part in placed.chosen.parts] == [0.5, 0.5, 1.0]


def test_links_between_the_hosts_of_named_devices_count(tmp_path: Path) -> None:
    hosts = [TargetDevice(name="cpu", host=host) for host in "ab"]
    bundle, used = chain(tmp_path), []
    for link in ("host=1/s,rtt=10s", "host=1TB/s,rtt=0s"):
        options = LoadOptions(devices=["cpu"], placement=PlacementOptions(links=[link]))
        placed = place_bundle(bundle, options, 2, hosts)
        assert placed.chosen is not None
        used.append(len(placed.chosen.parts))
    assert used == [1, 2]


def test_the_device_of_a_lost_process_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = chain(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    load = LoadOptions(devices=["auto"], placement=counts(2, 1, 1))
    asked = GroupOptions(load=load, processes=ProcessOptions(max_restarts=1, on_loss="regroup"))
    grouping = ProcessGrouping(bundle, 3, asked)
    _, running = grouping.placed_group()
    assert grouping.leave_out(running, StageLostError("", stages=(1,)), set())
    assert set(grouping.placed.options.devices) <= {"cuda:0", "cuda:2"}
    assert grouping.placed.chosen is not None
    names = [part.device.name for part in grouping.placed.chosen.parts]
    assert [*names, *(left.device.name for left in grouping.placed.chosen.left_out)] == ["cuda:0", "cuda:2"]


def chain(folder: Path) -> Bundle:
    """A bundle of four equal stages."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    return stagepack.export(layers, (torch.ones(2, 64),), out=folder / "m.stagepack", split_at=["1", "2", "3"])


def counts(*stages: int) -> PlacementOptions:
    return PlacementOptions(stages_per_device=stages)
