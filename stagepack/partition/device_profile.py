"""Device profiles: the speeds of well-known devices, for estimates in the place of the reference device.

The figures are the peaks of the data sheets of the vendors, without sparsity: `docs/how-to/choose-where-to-cut.md` names them. float32 is
without TF32, as torch multiplies by default.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from stagepack.errors import CutError
from stagepack.format.graph import Graph, Node
from stagepack.partition.costs import GraphCosts, LinkCosts, estimated_time
from stagepack.partition.profile import Profile, read_profile

_PICOSECONDS = 10**12  # in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The speed of a device.

    Attributes:
        name: the name by which it is asked for.
        flops: floating-point operations in a second, by dtype. Other dtypes are as fast as float32.
        memory_bandwidth: bytes that it reads or writes in a second.
        memory: bytes of its memory.
        link_bandwidth: bytes that it sends to another device in a second, in one direction.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: int
    link_bandwidth: float


def _device(
    name: str, half: float, single: float, double: float, bandwidth: float, memory: int, link: float
) -> DeviceProfile:
    """A device, from its TFLOP/s by dtype, its GB/s of memory, its GB of memory, and its GB/s to another device."""
    return DeviceProfile(
        name=name,
        flops=MappingProxyType(
            {
                "float64": double * 1e12,
                "float32": single * 1e12,
                "float16": half * 1e12,
                "bfloat16": half * 1e12,
            }
        ),
        memory_bandwidth=bandwidth * 1e9,
        memory=memory * 10**9,
        link_bandwidth=link * 1e9,
    )


DEVICE_PROFILES: Final[Mapping[str, DeviceProfile]] = MappingProxyType(
    {
        device.name: device
        for device in (
            # name, float16 and bfloat16, float32, float64, memory bandwidth, memory, link
            _device("v100", 125, 15.7, 7.8, 900, 32, 150),
            _device("t4", 65, 8.1, 0.25, 320, 16, 16),
            _device("a10", 125, 31.2, 0.49, 600, 24, 32),
            _device("a100", 312, 19.5, 19.5, 2039, 80, 300),
            _device("l4", 121, 30.3, 0.47, 300, 24, 32),
            _device("l40s", 362, 91.6, 1.4, 864, 48, 32),
            _device("h100", 989, 67, 67, 3350, 80, 450),
            _device("h200", 989, 67, 67, 4800, 141, 450),
            _device("b200", 2250, 75, 37, 7700, 180, 900),
            _device("mi300x", 1307, 163.4, 163.4, 5300, 192, 64),
        )
    }
)


def find_profile(name: str | os.PathLike[str]) -> Profile | DeviceProfile:
    """Return the profile of a device, or of a file.

    name: the name of one of `DEVICE_PROFILES`, such as ``"h100"``; or the path of a file that ``stagepack profile`` wrote.
    """
    device = DEVICE_PROFILES.get(os.fspath(name).lower())
    if device is not None:
        return device
    if not Path(name).exists():
        raise CutError(
            f"profile: expected a device ({', '.join(DEVICE_PROFILES)}) or a file that 'stagepack profile' wrote, found {name}"
        )
    return read_profile(name)


def device_costs(graph: Graph, costs: GraphCosts, device: DeviceProfile) -> GraphCosts:
    """Replace the times of the reference device by those of another one. The latencies stay."""
    return replace(
        costs,
        node_times=tuple(_node_time(node, device) for node in graph.nodes),
        link=LinkCosts(per_byte=_PICOSECONDS / device.link_bandwidth),
    )


def _node_time(node: Node, device: DeviceProfile) -> int:
    dtype = next((value.dtype for value in node.outputs if value is not None), "float32")
    flops_per_second = device.flops.get(dtype, device.flops["float32"])
    return estimated_time(
        round(node.cost.flops * _PICOSECONDS / flops_per_second),
        round(node.cost.bytes * _PICOSECONDS / device.memory_bandwidth),
    )
