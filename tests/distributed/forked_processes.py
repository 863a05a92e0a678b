"""Processes of stages that the fork server starts."""

import subprocess
from multiprocessing.context import ForkServerProcess
from typing import Any

import msgspec
import torch

from stagepack_loaders.distributed import process_program
from stagepack_loaders.distributed.local_launcher import LocalLauncher
from stagepack_loaders.distributed.process_program import ProcessDescription
from tests.fork_server import FORK_SERVER


class ForkedProcess:
    """A process with the methods of `subprocess.Popen` that `LocalLauncher` uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class ForkedProcesses(LocalLauncher):
    """Starts its processes from one that has imported torch."""

    def _launch(self, description: ProcessDescription) -> Any:
        process = FORK_SERVER.Process(target=_run_process, args=(msgspec.json.encode(description),), daemon=True)
        process.start()
        return ForkedProcess(process)

    @property
    def process_ids(self) -> dict[int, int]:
        """The number of each process at the operating system, by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}


def _run_process(content: bytes) -> None:
    torch.set_num_threads(1)
    process_program.run_process(msgspec.json.decode(content, type=ProcessDescription))
