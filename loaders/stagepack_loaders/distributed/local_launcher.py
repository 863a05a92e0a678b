"""Processes of stages on this machine, which this process starts, watches and ends."""

import contextlib
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import structs

from stagepack.format.reader import Bundle
from stagepack.format.threads import usable_cpu_count
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.distributed import process_program
from stagepack_loaders.distributed.membership import GroupOptions, absolute_bundle, check_options
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.process_end import ProcessEnd, exit_text
from stagepack_loaders.distributed.process_group import host_name, open_store
from stagepack_loaders.distributed.process_launcher import ProcessLauncher, over_processes
from stagepack_loaders.distributed.process_program import ProcessDescription
from stagepack_loaders.placement import place_stages
from stagepack_loaders.preparation import runtime_of_each_stage
from stagepack_loaders.python_process import module_command, module_environment

_END_SECONDS = 5.0


class LocalLauncher(ProcessLauncher["subprocess.Popen[bytes]"]):
    """Starts a group of processes on this machine, of which this one is the front, and runs no stages."""

    def _end_processes(self, *, wait: bool) -> None:
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _start_processes(self) -> Any:
        store = open_store()
        for rank in self._started_ranks:
            self._processes[rank] = self._launch(self._describe(rank, store))
            self._hosts[rank] = host_name()
        return store

    def _launch(self, description: ProcessDescription) -> "subprocess.Popen[bytes]":
        """Start a process. The cores of this machine are divided among the processes."""
        threads = max(1, usable_cpu_count() // (self._size - 1))
        environment = {"OMP_NUM_THREADS": str(threads)} | module_environment()
        description = structs.replace(description, parent=os.getpid())
        program = module_command(process_program.__name__, process_program.encode_description(description))
        # In a session of its own: it is left to this process what Ctrl-C in a terminal ends.
        return subprocess.Popen(  # noqa: S603 - this Python
            program, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _find_end(self, process: "subprocess.Popen[bytes]") -> ProcessEnd | None:
        status = process.poll()
        return None if status is None else ProcessEnd(reason=f"it ended with {exit_text(status)}", exit_status=status)


def start_local_pipeline(
    bundle: Bundle,
    process_count: int,
    options: GroupOptions,
    *,
    types: Collection[type],
    imports: Sequence[str],
    max_restarts: int,
    microbatch_size: int | None,
    limit: ValueLimit | None,
) -> DistributedPipeline:
    """Start processes of stages on this machine, and return the pipeline over them; see `stagepack.load`."""
    bundle = absolute_bundle(bundle)
    check_options(options, max_restarts, microbatch_size)
    stage_devices = place_stages(bundle.entry_point, options.devices)
    for runtime, device in zip(runtime_of_each_stage(options.runtime, bundle), stage_devices, strict=True):
        runtime.parse_device(device)
    local_options = over_processes(bundle, process_count, structs.replace(options, is_local=True))
    launcher = LocalLauncher(bundle, local_options, imports=imports)
    return DistributedPipeline(bundle, launcher, types, max_restarts, microbatch_size, limit)
