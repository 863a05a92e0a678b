"""Nodes that form one group on this machine: two torchruns, or processes with the variables that a launcher sets."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stagepack.format.reader import Bundle
from tests.process_facts import child_processes

HOST = socket.gethostname()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node runs: the arguments of ``stagepack``, further options of torchrun, and further variables."""

    arguments: Sequence[str | Path]
    torchrun_options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def load(bundle: Bundle | Path) -> Node:
    """A node that loads a bundle and runs its example."""
    return Node(arguments=["load", bundle.path if isinstance(bundle, Bundle) else bundle])


@contextlib.contextmanager
def torchruns(nodes: Sequence[Node]) -> Iterator[list["subprocess.Popen[str]"]]:
    """torchrun on each node, with one process each; the ranks are those of the nodes."""
    group = ["--nnodes", str(len(nodes)), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    group += ["--rdzv-conf", "timeout=60"]
    commands = [
        ["-m", "torch.distributed.run", *group, "--node-rank", str(rank), *node.torchrun_options, "-m", "stagepack"]
        for rank, node in enumerate(nodes)
    ]
    with _started([(command, node) for command, node in zip(commands, nodes, strict=True)], {}) as processes:
        yield processes


@contextlib.contextmanager
def launched(nodes: Sequence[Node]) -> Iterator[list["subprocess.Popen[str]"]]:
    """A process on each node, which finds the others by the variables of a launcher."""
    group = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with _started([(["-m", "stagepack"], node) for node in nodes], group) as processes:
        yield processes


@contextlib.contextmanager
def _started(
    programs: Sequence[tuple[list[str], Node]], group: Mapping[str, str]
) -> Iterator[list["subprocess.Popen[str]"]]:
    base = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *command, *map(str, node.arguments)],
            env={**base, **group, **({"RANK": str(rank)} if group else {}), **node.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (command, node) in enumerate(programs)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            for process_id in (*child_processes(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, 9)
            process.communicate()


def reasons(processes: Sequence["subprocess.Popen[str]"], seconds: float = 60.0) -> list[str]:
    """The last line of each node, when all have failed: of torchrun, the reason in its report."""
    lines = []
    for process in processes:
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode != 0, output
        *_, line = (line for line in output.splitlines() if line.strip("= "))
        lines.append(line.removeprefix("  traceback : ").removeprefix("stagepack: "))
    return lines
