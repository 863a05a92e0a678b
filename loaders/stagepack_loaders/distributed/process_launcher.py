"""Start the processes of a pipeline from the process that calls it: what its launchers have in common, and the launcher of this machine."""

import contextlib
import logging
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import structs

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import DeviceError, GroupError, StageLostError, StagepackError
from stagepack.format.reader import Bundle
from stagepack.format.threads import usable_cpu_count
from stagepack.named_adapters import adapter_texts, named_adapters, open_for_bundle
from stagepack.partition.placement import Placement
from stagepack.partition.target_devices import TargetDevice, check_process_count
from stagepack_loaders.distributed import stage_process
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.meeting import Seat, find_lost_connection, find_start_error
from stagepack_loaders.distributed.membership import (
    GroupOptions,
    VersionPlace,
    absolute_bundle,
    join_group,
    place_group,
    place_of_version,
    places_of_deltas,
    with_adapters_of,
)
from stagepack_loaders.distributed.process_group import host_name, open_store
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError, stages_of_rank
from stagepack_loaders.distributed.stage_process import ProcessDescription
from stagepack_loaders.distributed.status import ProcessEnd, exit_text, lost_error, stages_text
from stagepack_loaders.distributed.watch import LOST_STATUS
from stagepack_loaders.options import AUTO
from stagepack_loaders.placement import PlacedBundle, current_placement, of_processes, target_devices
from stagepack_loaders.python_process import module_command, module_environment

_LOGGER = logging.getLogger("stagepack")
# How long the first process that has ended gets to be found, when others have ended because of it.
_EXIT_SECONDS = 1.0
_CHECK_SECONDS = 0.05
# What a launcher has of a process that it has started.
Handle = TypeVar("Handle")
_END_SECONDS = 5.0


class ProcessLauncher(ABC, Generic[Handle]):
    """Starts a group of processes of which this one is the front, and runs no stages. The `GroupLauncher` of `DistributedPipeline`."""

    chosen: Placement | None = None

    def __init__(self, bundle: Bundle, options: GroupOptions) -> None:
        self._use(bundle, options)
        self._processes: dict[int, Handle] = {}
        self._hosts: dict[int, str] = {}
        self._store: Any = None

    def _use(self, bundle: Bundle, options: GroupOptions) -> None:
        self._bundle = bundle
        self._options = options
        self._size = max(options.rank_of_stage) + 1

    def start(self, report_loss: Callable[[StageLostError], None], check: Callable[[], None]) -> FrontProcess:
        """See `GroupLauncher`."""

        def check_all() -> None:
            check()
            self._check()

        self._hosts.clear()
        self._store = self._start_processes()
        try:
            membership = join_group(self._bundle, Seat(self._store, FRONT_RANK, self._size), self._options, check_all)
        except ConnectionLostError as error:
            self._check()
            raise StageLostError(f"a process of the pipeline is lost: {error}") from None
        processes = dict(self._processes)
        return FrontProcess(
            self._bundle, membership, find_end=lambda rank: self._find_end(processes[rank]), report_loss=report_loss
        )

    def find_version(self, bundle: Bundle) -> VersionPlace:
        """See `GroupLauncher`."""
        return place_of_version(bundle, self._options)

    def use_version(self, bundle: Bundle) -> None:
        """See `GroupLauncher`."""
        self._use(absolute_bundle(bundle), with_adapters_of(bundle, self._options))

    def leave_out(self, lost: StageLostError) -> None:
        """See `GroupLauncher`. Adapters that are not where they were are left out, too; calls that name one are refused."""
        if isinstance(self._bundle, AdaptedBundle) and (left := _left_adapters(self._bundle)) is not None:
            self.use_version(left)

    def stop(self, *, wait: bool) -> None:
        """See `GroupLauncher`."""
        self._end_processes(wait=wait)
        self._store = None

    @abstractmethod
    def _end_processes(self, *, wait: bool) -> None:
        """End the processes of the last group.

        wait: they are about to end by themselves; kill those that do not within some seconds.
        """

    @abstractmethod
    def _start_processes(self) -> Any:
        """Start a process for each rank but the front, add it to `_processes` and its host to `_hosts`; return the store of the group."""

    @abstractmethod
    def _find_end(self, process: Handle) -> ProcessEnd | None:
        """Return how a process has ended; None while it runs."""

    @property
    def _started_ranks(self) -> range:
        return range(FRONT_RANK + 1, self._size)

    def _stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of_rank(self._options.rank_of_stage, rank)

    def _stored_stages_of(self, rank: int) -> list[int]:
        return [stored for number in self._stages_of(rank) for stored in self._bundle.stored_stages(number)]

    def _describe(self, rank: int, store: Any) -> ProcessDescription:
        return ProcessDescription(
            bundle=f"{self._bundle.path}{self._bundle.fragment}",
            rank=rank,
            size=self._size,
            host=store.host,
            port=store.port,
            options=self._options,
            deltas=places_of_deltas(self._bundle, self._options),
            delta_digests=() if self._bundle.patches is None else tuple(self._bundle.patches.open_deltas),
        )

    def _check(self) -> None:
        """Raise an error if a process has ended; the first one, if others have ended because they lost it."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while ends := {rank: end for rank, process in self._processes.items() if (end := self._find_end(process))}:
            lost_connections = {rank: find_lost_connection(self._store, rank) for rank in ends}
            for rank in ends:
                if (error := self._find_start_error(rank)) is not None:
                    raise error
            for rank, end in ends.items():
                if lost_connections[rank] is None:
                    raise self._early_end(rank, end.reason, end.exit_status)
            if time.monotonic() > deadline:  # the other end of these connections is not known to have ended
                rank = min(ends)
                reason = f"it has lost its connection to another process: {lost_connections[rank]}"
                raise self._early_end(rank, reason, ends[rank].exit_status)
            time.sleep(_CHECK_SECONDS)

    def _find_start_error(self, rank: int) -> StagepackError | None:
        """Why a process could not begin, if it has told."""
        error = find_start_error(self._store, rank)
        if error is None or isinstance(error, StagepackError):
            return error
        return GroupError(
            f"process {rank}, which runs {stages_text(self._stored_stages_of(rank))}, cannot begin: {type(error).__name__}: {error}"
        )

    def _early_end(self, rank: int, reason: str, exit_status: int | None) -> StageLostError:
        return lost_error(
            rank,
            f"was lost before it was ready: {reason}",
            host=self._hosts.get(rank, ""),
            stages=self._stages_of(rank),
            stored_stages=self._stored_stages_of(rank),
            exit_status=exit_status,
        )


def _left_adapters(bundle: AdaptedBundle) -> AdaptedBundle | None:
    """Return a bundle with those of its adapters that can be opened again; None if all can."""
    left = dict(bundle.adapters)
    for named in named_adapters(adapter_texts(bundle)):
        try:
            open_for_bundle(named, bundle)
        except StagepackError as error:
            _LOGGER.warning("%s: starts again without the adapter %s: %s", bundle.location, named.name, error)
            del left[named.name]
    return bundle.with_others(left) if len(left) < len(bundle.adapters) else None


def over_processes(
    bundle: Bundle, process_count: int, options: GroupOptions, own_devices: Sequence[TargetDevice] | None = None
) -> tuple[PlacedBundle, GroupOptions]:
    """Return a bundle, and its options, over processes that a front without stages starts."""
    check_process_count(process_count, len(bundle.stages))
    placed, options = place_group(bundle, process_count, options, own_devices)
    # A process without stages is not started.
    ranks = {process: rank for rank, process in enumerate(dict.fromkeys(placed.processes), start=FRONT_RANK + 1)}
    return placed, structs.replace(options, rank_of_stage=tuple(ranks[process] for process in placed.processes))


class ProcessGrouping:
    """What the caller asks of the placement of stages on processes, and which processes are left.

    Attributes:
        placed: the bundle with the device and the process of each stage.
    """

    def __init__(self, bundle: Bundle, process_count: int, asked: GroupOptions) -> None:
        self._bundle, self._process_count, self._asked = bundle, process_count, asked
        check_process_count(process_count, len(bundle.stages))
        # The devices of "auto" are looked for once: the device of a lost process stays away.
        self._own_devices = target_devices(bundle, asked.load, process_count) if AUTO in asked.load.devices else None
        self.placed, self._placed_options = over_processes(bundle, process_count, asked, self._own_devices)

    def placed_group(self) -> tuple[Bundle, GroupOptions]:
        """Return the bundle in the stages that the processes run, and its options."""
        return self.placed.bundle, self._placed_options

    def use_version(self, bundle: Bundle) -> None:
        """Place another version from now on."""
        self._bundle = bundle.stored
        self._asked = with_adapters_of(bundle, self._asked)

    def leave_out(self, running: GroupOptions, lost: StageLostError, ended_ranks: set[int]) -> bool:
        """Place the stages on the processes that are left; False if nobody has asked for that, or they do not fit there.

        ended_ranks: further processes that are lost.
        """
        ranks = {running.rank_of_stage[stage] for stage in lost.stages}
        if self._asked.processes.on_loss != "regroup" or len(ranks) != 1:
            return False
        ranks |= ended_ranks
        lost_processes = {
            self.placed.processes[stage] for stage, rank in enumerate(running.rank_of_stage) if rank in ranks
        }
        left = [process for process in range(self._process_count) if process not in lost_processes]
        if not left:
            return False
        load = of_processes(self._asked.load, self._process_count, left)
        asked, process_count = structs.replace(self._asked, load=load), len(left)
        own_devices = None if self._own_devices is None else [self._own_devices[process] for process in left]
        try:
            self.placed, self._placed_options = over_processes(self._bundle, process_count, asked, own_devices)
        except DeviceError as error:
            _LOGGER.warning("%s: the same processes start again: %s", self._bundle.location, error)
            return False
        self._asked, self._process_count, self._own_devices = asked, process_count, own_devices
        return True


class LocalLauncher(ProcessLauncher["subprocess.Popen[bytes]"]):
    """Starts a group of processes on this machine, of which this one is the front, and runs no stages."""

    def __init__(self, bundle: Bundle, options: GroupOptions, grouping: "ProcessGrouping | None" = None) -> None:
        super().__init__(bundle, options)
        self._grouping = grouping
        self._ended_ranks: set[int] = set()
        self.chosen = None if grouping is None else grouping.placed.chosen

    def leave_out(self, lost: StageLostError) -> None:
        """See `GroupLauncher`."""
        super().leave_out(lost)
        if self._grouping is not None and self._grouping.leave_out(self._options, lost, self._ended_ranks):
            self._use(*self._grouping.placed_group())
            self.chosen = self._grouping.placed.chosen
            placement = self.chosen or current_placement(self._bundle, self._options.load.devices)
            _LOGGER.warning("%s: the processes that are left run %s", self._bundle.location, placement)

    def use_version(self, bundle: Bundle) -> None:
        """See `GroupLauncher`."""
        super().use_version(bundle)
        if self._grouping is not None:
            self._grouping.use_version(self._bundle)

    def _end_processes(self, *, wait: bool) -> None:
        if self._processes:
            self._ended_ranks = set() if wait else self._find_lost_ranks()
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _find_lost_ranks(self) -> set[int]:
        """The processes that have ended, but not because they lost another one."""
        ends = {rank: end for rank, process in self._processes.items() if (end := self._find_end(process)) is not None}
        return {
            rank
            for rank, end in ends.items()
            if end.exit_status != LOST_STATUS and find_lost_connection(self._store, rank) is None
        }

    def _start_processes(self) -> Any:
        store = open_store()
        for rank in self._started_ranks:
            self._processes[rank] = self._launch(self._describe(rank, store))
            self._hosts[rank] = host_name()
        return store

    def _launch(self, description: ProcessDescription) -> "subprocess.Popen[bytes]":
        """Start a process. The cores of this machine are divided among the processes."""
        threads = max(1, usable_cpu_count() // (self._size - 1))
        # A store that has gone is no error for a process that ends: torch would write 20 lines to a log of JSON.
        environment = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"} | module_environment()
        description = structs.replace(description, parent=os.getpid())
        program = module_command(stage_process.__name__, stage_process.encode_description(description))
        # In a session of its own: it is left to this process what Ctrl-C in a terminal ends.
        return subprocess.Popen(  # noqa: S603 - this Python
            program, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _find_end(self, process: "subprocess.Popen[bytes]") -> ProcessEnd | None:
        status = process.poll()
        return None if status is None else ProcessEnd(reason=f"it ended with {exit_text(status)}", exit_status=status)
