"""The speed of a machine: measured times of the nodes of a model, as a JSON file, or the data sheet of a well-known device.

A profile is no part of a bundle. The figures of devices are the peaks of the data sheets of the vendors, without sparsity:
`docs/how-to/choose-where-to-cut.md` names them. float32 is without TF32, as torch multiplies by default.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from stagepack.errors import CutError
from stagepack.format.graph import Graph, Node
from stagepack.format.output_file import output_file
from stagepack.format.rules import JSON_ERRORS
from stagepack.partition.costs import REFERENCE_LINK, GraphCosts, LinkCosts, estimated_time

# Finite, so that sums of times are numbers of 64 bits.
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_PICOSECONDS = 10**12  # in a second
_Record = TypeVar("_Record")


class NodeTime(Struct, frozen=True, kw_only=True):
    """The time of one node.

    Attributes:
        node: its number in the graph of the whole model, which no cut changes; as in a plan.
        op: its operator, for people.
        module: the path of the module that it came from, for people.
        seconds: the median of its runs.
    """

    node: int
    op: str
    module: str
    seconds: Seconds


class StageTime(Struct, frozen=True, kw_only=True):
    """The time of one stage of the bundle that was measured.

    Attributes:
        stage: its number.
        device: its device, such as ``cuda:0``.
        seconds: the median of its runs as a whole. The times of its nodes have this sum.
    """

    stage: int
    device: str
    seconds: Seconds


class LinkTime(Struct, frozen=True, kw_only=True):
    """The time of sending a value from one process to another: ``seconds_per_value + byte_count * seconds_per_byte``.

    Attributes:
        seconds_per_value: the time of a small value.
        seconds_per_byte: the further time of each byte.
    """

    seconds_per_value: Seconds
    seconds_per_byte: Seconds


class Profile(Struct, frozen=True, kw_only=True):
    """Measured times of a model, for the `profile` argument of `stagepack.export` and `stagepack.recut`.

    Attributes:
        version: the version of the file.
        model: `model_digest` of the model.
        bundle: the digest of the bundle that was measured. Any other cut of the model has the same nodes.
        machine: the processor, and the name of the device if that is another.
        torch: the version of torch.
        threads: the number of threads that an operator uses on the processor.
        runs: how often each stage ran for a median.
        sizes: the size of each symbol in the inputs that were run.
        stages: the stages of the bundle.
        link: the time of sending values between stages, if it was measured.
        nodes: the nodes. Nodes that are not here have estimated times.
    """

    version: Literal[1] = 1
    model: str
    bundle: str
    machine: str
    torch: str
    threads: int
    runs: int
    sizes: dict[str, int]
    stages: tuple[StageTime, ...]
    link: LinkTime | None = None
    nodes: tuple[NodeTime, ...]


def model_digest(graph: Graph) -> str:
    """Return a digest of what the times of a model are for: its nodes with their operators, modules and shapes, in any cut."""
    nodes = [
        (
            graph.ops[node.op].name,
            graph.scopes[node.scope].path,
            [None if value is None else (value.dtype, value.shape) for value in node.outputs],
        )
        for node in graph.nodes
    ]
    return hashlib.sha256(msgspec.msgpack.encode(nodes)).hexdigest()


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Args:
        path: a file that ``stagepack profile`` wrote.

    Returns:
        The profile, for the `profile` argument of `stagepack.export` and `stagepack.recut`.

    Raises:
        CutError: the file cannot be read, or is not a profile.

    Examples:
        ::

            profile = stagepack.read_profile("times.json")
            stagepack.recut("m.stagepack", out="m4.stagepack", stages=4, profile=profile)
    """
    return read_json(path, Profile, "profile", "stagepack profile")


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile, with one line for each stage and each node. A file of that name is replaced."""
    write_json(profile, path, ("stages", "nodes"))


def read_json(path: str | os.PathLike[str], record_type: type[_Record], noun: str, command: str) -> _Record:
    """Read a plan or a profile."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=record_type)
    except OSError as error:
        raise CutError(f"{path}: the {noun} cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise CutError(f"{path}: expected a {noun}, as written by '{command}': {error}") from None


def write_json(fields: object, path: str | os.PathLike[str], listed: Collection[str]) -> None:
    """Write the fields of a plan or a profile, of some one line for each item. A file of that name is replaced."""
    encoded = []
    for field_name, value in msgspec.to_builtins(fields).items():
        items = ",\n".join(f"  {json.dumps(item)}" for item in value) if field_name in listed else ""
        encoded.append(f" {json.dumps(field_name)}: " + (f"[\n{items}\n ]" if items else json.dumps(value)))
    content = ",\n".join(encoded)
    with output_file(path) as new_file:
        new_file.write_text(f"{{\n{content}\n}}\n", encoding="utf-8")


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
        flops={"float64": double * 1e12, "float32": single * 1e12, "float16": half * 1e12, "bfloat16": half * 1e12},
        memory_bandwidth=bandwidth * 1e9,
        memory=memory * 10**9,
        link_bandwidth=link * 1e9,
    )


DEVICE_PROFILES: Final[Mapping[str, DeviceProfile]] = {
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


def find_profile(name: str | os.PathLike[str]) -> Profile | DeviceProfile:
    """Return the profile of a device, or of a file.

    name: the name of one of `DEVICE_PROFILES`, such as ``"h100"``; or the path of a file that ``stagepack profile`` wrote.
    """
    device = DEVICE_PROFILES.get(os.fspath(name).lower())
    if device is not None:
        return device
    if not os.path.exists(name):  # an empty path, which is the current folder to `Path`, does not
        raise CutError(
            f"profile: expected a device ({', '.join(DEVICE_PROFILES)}) or a file that 'stagepack profile' wrote, found {os.fspath(name)!r}"
        )
    return read_profile(name)


def device_costs(graph: Graph, costs: GraphCosts, device: DeviceProfile) -> GraphCosts:
    """Replace the times of the reference device by the times of another device. The latencies stay."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """The costs of a graph with measured times."""

    # The costs; times that were not measured are estimates times `scale`.
    costs: GraphCosts
    measured_count: int
    # The sum of the measured times divided by the sum of the estimates of the same nodes.
    scale: float


def check_profile_model(profile: Profile, graph: Graph) -> None:
    """Refuse the times of another model."""
    found_digest = model_digest(graph)
    if profile.model != found_digest:
        raise CutError(
            f"profile: expected times of this model ({found_digest[:12]}), found those of another one ({profile.model[:12]}): "
            "measure this model with 'stagepack profile'"
        )


def measured_costs(graph: Graph, costs: GraphCosts, profile: Profile) -> MeasuredCosts:
    """Replace estimated times of nodes by measured times, and the time of sending values if the profile has it. Other costs stay."""
    check_profile_model(profile, graph)
    measured_times = {
        node_time.node: max(round(node_time.seconds * _PICOSECONDS), 1)
        for node_time in profile.nodes
        if 0 <= node_time.node < len(graph.nodes)
    }
    if not measured_times and graph.nodes:
        raise CutError("profile: expected the time of at least one node, found none: run 'stagepack profile' again")
    estimated_sum = sum(costs.node_times[node_number] for node_number in measured_times)
    scale = sum(measured_times.values()) / estimated_sum if estimated_sum else 1.0
    node_times = tuple(
        measured_times.get(node_number, max(round(estimate * scale), 1))
        for node_number, estimate in enumerate(costs.node_times)
    )
    return MeasuredCosts(
        costs=replace(costs, node_times=node_times, link=profile_link(profile)),
        measured_count=len(measured_times),
        scale=scale,
    )


def profile_link(profile: Profile) -> LinkCosts:
    """Return the measured costs of sending values; those of the reference device if they were not measured."""
    if profile.link is None:
        return REFERENCE_LINK
    return LinkCosts(
        per_value=round(profile.link.seconds_per_value * _PICOSECONDS),
        per_byte=profile.link.seconds_per_byte * _PICOSECONDS,
    )
