"""Processes of stages on this machine, which this process starts, watches and ends."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from stagepack.errors import OptionError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed import local_process
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.local_process import ProcessDescription
from stagepack_loaders.distributed.membership import GroupOptions, join_group
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.process_group import ConnectionLostError, host_name, open_local_store
from stagepack_loaders.distributed.routes import FRONT_RANK, assign_stages
from stagepack_loaders.distributed.stage_process import exit_text

_END_SECONDS = 5.0


class LocalProcesses:
    """Starts a group of processes on this machine, of which this one is the front, and runs no stages."""

    def __init__(self, bundle: Bundle, options: GroupOptions, *, imports: Sequence[str] = ()) -> None:
        """Keep what the processes need.

        Args:
            bundle: the bundle.
            options: how the pipeline is distributed; rank 0 runs no stage.
            imports: modules that each process imports first, such as those that register custom operators.
        """
        self._bundle = bundle
        self._options = options
        self._imports = tuple(imports)
        self._size = max(options.rank_of_stage) + 1
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, report_loss: Callable[[StageLostError], None]) -> FrontProcess:
        """Start the processes, and return their front when all have loaded their stages.

        Raises:
            StageLostError: a process ended before.
            StagepackError: a process could not load its stages.
        """
        store = open_local_store()
        for rank in range(FRONT_RANK + 1, self._size):
            self._processes[rank] = self._launch(self._describe(rank, store.port))
        try:
            membership = join_group(self._bundle, store, FRONT_RANK, self._size, self._options, self._check)
        except ConnectionLostError as error:
            self._check()
            raise StageLostError(f"a process of the pipeline is lost: {error}") from None
        processes = dict(self._processes)
        return FrontProcess(
            self._bundle,
            membership,
            exit_status=lambda rank: processes[rank].poll(),
            report_loss=report_loss,
        )

    def stop(self, *, wait: bool) -> None:
        """End the processes.

        Args:
            wait: they are about to end by themselves; kill those that do not within some seconds.
        """
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _describe(self, rank: int, port: int) -> ProcessDescription:
        return ProcessDescription(
            bundle=str(self._bundle.path.absolute()),
            imports=self._imports,
            rank=rank,
            size=self._size,
            port=port,
            options=self._options,
        )

    def _launch(self, description: ProcessDescription) -> "subprocess.Popen[bytes]":
        """Start a process. The cores of this machine are divided among the processes."""
        threads = max(1, len(os.sched_getaffinity(0)) // (self._size - 1))
        environment = os.environ | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        }
        program = [sys.executable, "-m", local_process.__name__, msgspec.json.encode(description).decode()]
        return subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - this Python

    def _check(self) -> None:
        """Raise an error if a process has ended."""
        for rank, process in self._processes.items():
            if (status := process.poll()) is not None:
                stages = tuple(
                    number for number, stage_rank in enumerate(self._options.rank_of_stage) if stage_rank == rank
                )
                raise StageLostError(
                    f"process {rank}, which runs the stages {', '.join(map(str, stages))}, ended with {exit_text(status)} before it was "
                    "ready",
                    stages=stages,
                    host=host_name(),
                    exit_status=status,
                )


def start_local_pipeline(
    bundle: Bundle,
    process_count: int,
    *,
    devices: tuple[str, ...],
    runtime: str | tuple[str, ...],
    types: Collection[type],
    allow_ops: tuple[str, ...],
    verify: bool,
    imports: Sequence[str],
    max_restarts: int,
    in_flight: int,
) -> DistributedPipeline:
    """Start processes of stages on this machine, and return the pipeline over them; see `stagepack.load`."""
    ranks = range(FRONT_RANK + 1, FRONT_RANK + 1 + process_count)
    if not 1 <= process_count <= len(bundle.stages):
        raise OptionError(
            f"expected 1 to {len(bundle.stages)} processes for {len(bundle.stages)} stages, found {process_count}"
        )
    options = GroupOptions(
        rank_of_stage=assign_stages(bundle.manifest, ranks),
        devices=devices,
        runtime=runtime,
        allow_ops=allow_ops,
        verify=verify,
        in_flight=in_flight,
        is_local=True,
    )
    launcher = LocalProcesses(bundle, options, imports=imports)
    return DistributedPipeline(bundle, launcher, types, max_restarts)
