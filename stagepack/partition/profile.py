"""A profile: how long the nodes of a model took on a machine, as a JSON file. It is no part of a bundle."""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from stagepack.errors import CutError
from stagepack.format.codec import JSON_ERRORS
from stagepack.format.graph import Graph
from stagepack.format.output_file import output_file

# Finite, so that sums of times are numbers of 64 bits.
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


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
    """The time of sending a value from one process to another.

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
    """Return a digest of what the times of a model are for: its nodes with their operators, modules and shapes.

    Models that differ in the values of their weights alone have one digest, as have all cuts of a model.
    """
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
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise CutError(f"{path}: the profile cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise CutError(f"{path}: expected a profile, as written by 'stagepack profile': {error}") from None


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile, with one line for each stage and each node. A file of that name is replaced."""
    fields = msgspec.to_builtins(profile)
    lines = [
        f" {json.dumps(field)}: {_lines(value) if field in ('stages', 'nodes') else json.dumps(value)}"
        for field, value in fields.items()
    ]
    content = ",\n".join(lines)
    with output_file(path) as new_file:
        new_file.write_text(f"{{\n{content}\n}}\n", encoding="utf-8")


def _lines(items: list[object]) -> str:
    content = ",\n".join(f"  {json.dumps(item)}" for item in items)
    return f"[\n{content}\n ]"
