"""Nodes that form one group on this machine: two torchruns, or processes with the variables that a launcher sets."""

import contextlib
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed.run

from stagepack.format.reader import Bundle
from tests.distributed.bundles import tree_environment
from tests.process_facts import child_processes
from tools.fork_server import ForkedProcess, command_with_log

HOST = socket.gethostname()
TORCHRUN = Path(torch.distributed.run.__file__)
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,]+ ERROR ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node runs: the arguments of ``stagepack``, and further variables."""

    arguments: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)


def load(bundle: Bundle | Path) -> Node:
    """A node that loads a bundle and runs its example."""
    return Node(arguments=["load", bundle.path if isinstance(bundle, Bundle) else bundle])


@dataclass(frozen=True, slots=True)
class Started:
    """A process, and the file of both of its outputs."""

    process: ForkedProcess
    log_path: Path

    @property
    def output(self) -> str:
        # The process makes it.
        return self.log_path.read_text() if self.log_path.exists() else ""


@contextlib.contextmanager
def torchruns(nodes: Sequence[Node]) -> Iterator[list[Started]]:
    """torchrun on each node, with one process each, which begins as its own program; the ranks are those of the nodes."""
    group = ["--nnodes", str(len(nodes)), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    group += ["--rdzv-conf", "timeout=60"]
    commands = [[*group, "--node-rank", str(rank), "-m", "stagepack"] for rank in range(len(nodes))]
    with _started(nodes, commands, [{}] * len(nodes), TORCHRUN) as processes:
        yield processes


@contextlib.contextmanager
def launched(nodes: Sequence[Node]) -> Iterator[list[Started]]:
    """A process on each node, which finds the others by the variables of a launcher."""
    group = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = [group | {"RANK": str(rank)} for rank in range(len(nodes))]
    with _started(nodes, [[]] * len(nodes), variables) as processes:
        yield processes


@contextlib.contextmanager
def _started(
    nodes: Sequence[Node],
    commands: Sequence[list[str]],
    variables: Sequence[dict[str, str]],
    script: Path | None = None,
) -> Iterator[list[Started]]:
    processes: list[Started] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for node, command, group in zip(nodes, commands, variables, strict=True):
                log_path = Path(folder, str(len(processes)))
                arguments = [*command, *map(str, node.arguments)]
                environment = tree_environment() | group | node.environment
                process = command_with_log(arguments, log_path, environment, Path.cwd(), script=script)
                processes.append(Started(process, log_path))
            yield processes
        finally:
            for started in processes:
                for process_id in (*child_processes(started.process.pid), started.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                started.process.wait()


def reasons(processes: Sequence[Started], seconds: float = 60.0) -> list[str]:
    """The reason in the last line of each node, when all have failed: in the report of torchrun, from the command or in the log."""
    lines = []
    for started in processes:
        assert started.process.wait(timeout=seconds) != 0, started.output
        *_, line = (line for line in started.output.splitlines() if line.strip("= "))
        # A process that was connected before another one failed learns it by the loss of the connection, and logs the reason.
        lines.append(_LOG_PREFIX.sub("", line.removeprefix("  traceback : ").removeprefix("stagepack: ")))
    return lines
