"""A pipeline over the processes that torchrun, or another launcher with its environment variables, has started."""

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct, structs

from stagepack.errors import GroupError, OptionError, StageLostError, StagepackError, repeated_error
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters
from stagepack.opening import BundleSource
from stagepack.partition.profile import DeviceProfile
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.call_limits import Limits, checked_limits, value_limit
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.launch_environment import (
    has_launcher,
    is_torchrun,
    launched_address,
    launched_size,
    local_place,
)
from stagepack_loaders.distributed.launch_failures import (
    INFORM_SECONDS,
    LaunchFailures,
    launched_origin,
    open_failures,
)
from stagepack_loaders.distributed.meeting import Seat, chosen_address, launched_seat
from stagepack_loaders.distributed.membership import (
    GroupOptions,
    VersionPlace,
    absolute_bundle,
    group_options,
    join_group,
    place_group,
    place_of_version,
)
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.process_group import host_name
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.stage_process import end_with_parent, run_stage_process
from stagepack_loaders.distributed.status import attribute_error
from stagepack_loaders.options import (
    AUTO,
    DEFAULT_IN_FLIGHT,
    AdapterSources,
    Compile,
    LoadOptions,
    PlacementOptions,
    ProcessOptions,
    Verify,
    adapter_list,
    device_list,
    folder_name,
)
from stagepack_loaders.placement import PlacedBundle, target_devices
from stagepack_loaders.preparation import open_for_loading

_CONNECTIONS = itertools.count()


def connect(
    bundle: "str | os.PathLike[str] | Bundle",
    devices: str | Sequence[str] = ("cpu",),
    *,
    runtime: str | Sequence[str] = "torch",
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    copy: bool = False,
    compile: Compile = False,
    compiled: str | os.PathLike[str] | None = None,
    adapters: AdapterSources = None,
    in_flight: int = DEFAULT_IN_FLIGHT,
    limits: Limits | None = None,
    microbatch_size: int | None = None,
    start_seconds: float = 60.0,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profiles: Sequence[str] = (),
    links: Sequence[str] = (),
    stages_per_device: Sequence[int] = (),
) -> DistributedPipeline | None:
    """Run a bundle in the processes that ``torchrun`` has started. Each of them calls this function with the same arguments.

    Each process loads some consecutive stages, and no file of others. Process 0 gets the pipeline; the others run their stages until it
    closes the pipeline. A launcher that has other means must set the variables that ``torchrun`` sets: RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT; and if a process ends, it must end the others, which wait for it while they load. The processes trust each other
    and their network: torch.distributed neither authenticates nor encrypts.

    Args:
        bundle: the folder of the bundle, or an opened bundle; the same bundle for each process, on a path of its own.
        devices: the device of each stage, in order, or of each process; with fewer processes than stages, consecutive stages are joined.
            ``"auto"``: for each process the GPU of its number on its machine, or its share of the CPU.
        runtime: as for `stagepack.load`.
        types: as for `stagepack.load`.
        allow_ops: as for `stagepack.load`.
        verify: as for `stagepack.load`.
        copy: as for `stagepack.load`.
        compile: as for `stagepack.load`.
        compiled: as for `stagepack.load`.
        adapters: as for `stagepack.load`: the same ones in the same order, for each process on paths of its own; those of `load_adapter`
            are on the same path on each machine.
        in_flight: the largest number of requests on their way.
        limits: as for `stagepack.load`.
        microbatch_size: as for `stagepack.load`.
        start_seconds: how long to wait for the other processes to come, in seconds.
        memory: as for `stagepack.load`; a device is that of one process.
        speeds: as for `stagepack.load`.
        profiles: as for `stagepack.load`; each machine has the files on the same paths.
        links: as for `stagepack.load`.
        stages_per_device: as for `stagepack.load`.

    Returns:
        The pipeline in process 0; None in the others, when it is closed.

    Raises:
        OptionError: no launcher has started this process.
        GroupError: a process has not come in time, or has another bundle or other versions than process 0; or there are more processes
            than stages.
        StageLostError: a process has ended.
        StagepackError: a process could not load its stages; see `stagepack.load`.

    Examples:
        >>> pipeline = stagepack.distributed.connect("m.stagepack")   # torchrun --nproc-per-node 3 this_script.py
        >>> if pipeline is not None:
        ...     with pipeline:
        ...         logits = pipeline(input_ids)
    """
    options = LoadOptions(
        devices=device_list(devices),
        runtime=runtime,
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile,
        compiled=folder_name(compiled),
        adapters=adapter_list(adapters),
        placement=PlacementOptions(
            memory=memory, speeds=speeds, profiles=profiles, links=links, stages_per_device=stages_per_device
        ),
    )
    processes = ProcessOptions(in_flight=in_flight, microbatch_size=microbatch_size, start_seconds=start_seconds)
    return connect_launched(bundle, options, processes, types, checked_limits(limits))


def connect_launched(
    bundle: BundleSource, options: LoadOptions, processes: ProcessOptions, types: Collection[type], limits: Limits
) -> DistributedPipeline | None:
    """See `connect`."""
    if not has_launcher():
        raise OptionError(
            "expected the environment of torchrun: run torchrun --nproc-per-node 3 SCRIPT, or use stagepack.load(..., processes=True)"
        )
    connection = next(_CONNECTIONS)
    failures: LaunchFailures | None = None
    try:
        opened_bundle = absolute_bundle(open_for_loading(bundle, options.verify))
        options = structs.replace(options, adapters=pinned_adapters(opened_bundle, options.adapters))
        group = group_options(options, processes, limits)
        _check_size(opened_bundle, launched_size())
        failures = open_failures(processes.start_seconds, connection)
        seat = launched_seat(processes.start_seconds, str(connection))
        has_choice = AUTO in options.devices or options.placement.is_given
        own_devices = _devices_of_processes(opened_bundle, seat, group) if has_choice else None
        placed, group = place_group(opened_bundle, seat.size, group, own_devices)
        group = structs.replace(group, address=chosen_address(launched_address()))
        opened_bundle = placed.bundle
        if seat.rank == FRONT_RANK:
            limit = value_limit(opened_bundle, limits)
            launcher = _TorchrunLauncher(placed, seat, group, failures)
            # Only the launcher can start the processes again.
            options_here = structs.replace(processes, max_restarts=0)
            return DistributedPipeline(opened_bundle, launcher, types, options_here, limit)
        if is_torchrun():
            end_with_parent(os.getppid())
        run_stage_process(opened_bundle, seat, group, failures)
    except Exception as error:
        _tell(error, failures, connection)
        raise
    return None


def _check_size(bundle: Bundle, size: int) -> None:
    if size > len(bundle.stages):
        raise GroupError(
            f"expected 1 to {len(bundle.stages)} processes for {len(bundle.stages)} stages, found {size}: start fewer, such as by "
            "--nnodes and --nproc-per-node of torchrun"
        )


class _DeviceReport(Struct, frozen=True, kw_only=True):
    """The device that a process may use, as the fields of a `TargetDevice`."""

    device: dict[str, Any]
    profile: dict[str, Any] | None


def _devices_of_processes(bundle: Bundle, seat: Seat, group: GroupOptions) -> list[TargetDevice]:
    """The device of each process, which they tell each other: what the caller names, or the GPU of its number on its host, else the CPU."""
    devices = target_devices(bundle, group.load, None if AUTO in group.load.devices else seat.size)
    if AUTO in group.load.devices:
        local_rank, _ = local_place()
        device = devices[min(local_rank, len(devices) - 1)]
    else:
        device = devices[seat.rank]
    device, profile = replace(device, host=host_name(), profile=None), device.profile
    report = _DeviceReport(
        device=msgspec.to_builtins(device), profile=None if profile is None else msgspec.to_builtins(profile)
    )
    reports = seat.exchange_reports("device", report, seconds=group.processes.start_seconds)
    return [
        TargetDevice(**report.device | {"profile": report.profile and msgspec.convert(report.profile, DeviceProfile)})
        for report in reports
    ]


def _tell(error: Exception, failures: LaunchFailures | None, connection: int) -> None:
    """Tell the other processes why this one fails, and wait until they know."""
    with contextlib.suppress(StagepackError):  # process 0 is not there
        failures = failures or open_failures(INFORM_SECONDS, connection)
        failures.tell(error)
        failures.wait_until_informed()
    if isinstance(error, StagepackError):
        attribute_error(error, launched_origin())


class _TorchrunLauncher:
    """The launcher of processes that torchrun, or another one with its variables, has started: only that one can start them again."""

    def __init__(self, placed: PlacedBundle, seat: Seat, options: GroupOptions, failures: LaunchFailures) -> None:
        self._bundle, self.chosen = placed.bundle, placed.chosen
        self._seat = seat
        self._options = options
        self._failures = failures

    def start(self, report_loss: Callable[[StageLostError], None], check: Callable[[], None]) -> FrontProcess:
        """See `GroupLauncher`."""

        def check_all() -> None:
            check()
            self._failures.check()

        def report_and_tell(lost: StageLostError) -> None:
            report_loss(lost)
            self._failures.tell(repeated_error(lost))

        try:
            with self._failures.watching():
                membership = join_group(self._bundle, self._seat, self._options, check_all, raises_at_once=True)
        except ConnectionLostError as error:
            raise StageLostError(f"a process of the pipeline is lost: {error}") from None
        return FrontProcess(self._bundle, membership, report_loss=report_and_tell)

    def find_version(self, bundle: Bundle) -> VersionPlace:
        """See `GroupLauncher`."""
        return place_of_version(bundle, self._options)

    def use_version(self, bundle: Bundle) -> None:
        """See `GroupLauncher`. The launcher of the processes starts them with the bundle of their command."""

    def leave_out(self, lost: StageLostError) -> None:
        """See `GroupLauncher`. The launcher of the processes decides how many it starts again."""

    def stop(self, *, wait: bool) -> None:
        """See `GroupLauncher`. The processes end by themselves."""
