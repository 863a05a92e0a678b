"""Processes of stages that the fork server starts."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from stagepack_loaders.distributed import stage_process
from stagepack_loaders.distributed.process_launcher import LocalLauncher
from stagepack_loaders.distributed.stage_process import ProcessDescription
from tools.fork_server import FORK_SERVER, ForkedProcess


class ForkedProcesses(LocalLauncher):
    """Starts its processes from one that has imported torch."""

    def _launch(self, description: ProcessDescription) -> Any:
        content = msgspec.json.encode(description)
        return ForkedProcess(FORK_SERVER.Process(target=_run_process, args=(content,), daemon=True))

    @property
    def process_ids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}


def forked_launches() -> AbstractContextManager[object]:
    """Return a context in which `stagepack.load` and the command fork the processes of stages: they begin with torch imported."""
    return patch.object(LocalLauncher, "_launch", ForkedProcesses._launch)


def _run_process(content: bytes) -> None:
    torch.set_num_threads(1)
    stage_process.run_process(msgspec.json.decode(content, type=ProcessDescription))
