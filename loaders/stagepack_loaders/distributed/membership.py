"""Become one of the processes of a pipeline: meet the others, load the own stages, connect."""

import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct, structs
from torch.distributed.distributed_c10d import Store

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import OptionError, StagepackError, named_errors
from stagepack.format.aliasing import written_inputs
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.listed_files import ListedFiles
from stagepack.format.reader import Bundle
from stagepack.named_adapters import adapter_texts, named_adapters
from stagepack.partition.target_devices import TargetDevice
from stagepack.terminal import byte_progress
from stagepack_loaders.base import LoadedStage, Loading
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.distributed.device_groups import Connections, connect_channels, device_port, mark_device_routes
from stagepack_loaders.distributed.local_links import LinkListener, connect_links, find_local_routes
from stagepack_loaders.distributed.meeting import (
    Identity,
    Members,
    Seat,
    StageFacts,
    check_identities,
    own_identity,
    reachable_address,
)
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, host_name
from stagepack_loaders.distributed.routes import FRONT_RANK, Route, find_routes, stages_of_rank
from stagepack_loaders.distributed.status import ErrorReport, attribute_error, rebuild_error, report_error, stages_text
from stagepack_loaders.options import LoadOptions, ProcessOptions
from stagepack_loaders.placement import PlacedBundle, place_bundle
from stagepack_loaders.preparation import compile_prepared, open_for_loading, prepare
from stagepack_loaders.registry import find_runtime, runtime_of_each_stage

# Weights may take long to read; a process that ends meanwhile is found by the launcher.
_LOAD_SECONDS = 24 * 3600.0
# How much longer than the front the other processes wait for all to come.
_FURTHER_SECONDS = 2.0
_PROGRESS_KEY: Final = "weight bytes read"
_SECONDS_BETWEEN_UPDATES: Final = 0.2


class GroupOptions(Struct, frozen=True, kw_only=True):
    """How a pipeline is distributed, alike in all its processes; see `stagepack.load`.

    Attributes:
        load: how the stages are loaded.
        processes: how the processes run.
        rank_of_stage: the process that runs each stage; empty before it is known, see `place_group`.
        stage_counts: for each stage, the number of stages of the bundle that it consists of; empty for one each.
        stall_seconds: after how long without an answer a process is taken for lost; None for never.
        is_local: all processes are on this machine, and listen on its loopback interface alone.
        address: where they are not, the address of the machine of this process, by which the others reach it; None for the address
            of its host name. The processes may differ in this option alone.
    """

    load: LoadOptions = LoadOptions()
    processes: ProcessOptions = ProcessOptions()
    rank_of_stage: tuple[int, ...] = ()
    stage_counts: tuple[int, ...] = ()
    stall_seconds: float | None = None
    is_local: bool = False
    address: str | None = None


class LoadReport(Struct, frozen=True, kw_only=True):
    """What a process has loaded, or why it could not."""

    stages: tuple[StageFacts, ...] = ()
    error: ErrorReport | None = None


@dataclass(kw_only=True, eq=False)
class Membership(Members):
    """A process that is connected to all others, with its loaded stages by number, and the routes of the pipeline."""

    options: GroupOptions
    stages: Mapping[int, LoadedStage]
    routes: tuple[Route, ...]
    connections: Connections
    local_routes: frozenset[Route]

    @property
    def stage_numbers(self) -> list[int]:
        """The numbers of the stages of this process."""
        return [facts.stage for facts in self.stage_facts if facts.rank == self.group.rank]

    def take_stages(self) -> Mapping[int, LoadedStage]:
        """Return the stages to whoever replaces them by other versions: nothing else refers to them then."""
        stages, self.stages = self.stages, {}
        return stages

    @property
    def process_names(self) -> dict[int, str]:
        """The rank, host and stages of each process for people, by rank."""
        names = {}
        for rank, identity in enumerate(self.identities):
            stages = self.stored_stages(rank)
            names[rank] = f"process {rank} on {identity.host}, {stages_text(stages) if stages else 'the caller'}"
        return names

    def abort(self) -> None:
        """Close all connections. Whatever waits for another process, here or there, ends with `ConnectionLostError`."""
        self.connections.abort()

    def close(self) -> None:
        """Close all connections, and that to the store, when no thread uses them."""
        self.connections.close()
        self.store = None  # type: ignore[assignment] # nothing looks for it any more


def absolute_bundle(bundle: Bundle) -> Bundle:
    """Return the bundle by its absolute path: processes read it later, when this one may have another current folder."""
    if bundle.path.is_absolute():
        return bundle
    absolute = copy.copy(bundle)
    absolute.path = bundle.path.absolute()
    return absolute


class VersionPlace(NamedTuple):
    """Where the processes of a group find a version of its bundle, and the deltas that make it: folders, or URLs of what is remote."""

    bundle: str
    deltas: tuple[str, ...]


def place_of_version(bundle: Bundle, options: GroupOptions) -> VersionPlace:
    """Return where the processes of a group find another version of its bundle.

    Processes on this machine open the folder of a remote bundle or delta too, which must have all their files.
    """
    if options.is_local:
        runtimes = runtime_of_each_stage(options.load.runtime, bundle)
        bundle.fetch(
            file_name
            for stage_number, stage_runtime in enumerate(runtimes)
            for file_name in stage_runtime.stage_files(bundle, stage_number)
        )
    return VersionPlace(f"{_place(bundle, options)}{bundle.fragment}", places_of_deltas(bundle, options))


def places_of_deltas(bundle: Bundle, options: GroupOptions) -> tuple[str, ...]:
    """Return where the processes of a group find the deltas that make a bundle."""
    deltas = () if bundle.patches is None else bundle.patches.open_deltas.values()
    return tuple(_place(delta, options) for delta in deltas)


def _place(listed: ListedFiles, options: GroupOptions) -> str:
    url = None if options.is_local or listed.source is None else listed.source.url
    return os.path.abspath(listed.path) if url is None else url


def group_options(load: LoadOptions, processes: ProcessOptions, limits: Limits) -> GroupOptions:
    """Return options as processes can read them; which processes there are is not known yet."""
    load = structs.replace(
        load,
        devices=[str(device) for device in load.devices],
        allow_ops=list(load.allow_ops),
        compiled=None if load.compiled is None else os.path.abspath(load.compiled),
        adapters=None if load.adapters is None else [str(adapter) for adapter in named_adapters(load.adapters)],
    )
    options = GroupOptions(load=load, processes=processes, stall_seconds=limits.stall_seconds)
    try:
        return msgspec.convert(msgspec.to_builtins(options), GroupOptions)
    except (msgspec.ValidationError, TypeError) as error:
        raise OptionError(str(error)) from None


def with_adapters_of(bundle: Bundle, options: GroupOptions) -> GroupOptions:
    """Return options with which processes load the adapters of a bundle, which may have changed since the first start."""
    adapters = adapter_texts(bundle) if isinstance(bundle, AdaptedBundle) else None
    return structs.replace(options, load=structs.replace(options.load, adapters=adapters))


def place_group(
    bundle: Bundle, process_count: int, options: GroupOptions, own_devices: Sequence[TargetDevice] | None = None
) -> tuple[PlacedBundle, GroupOptions]:
    """Choose the process and the device of each stage, and join those that have both in common; the first process has the rank 0.

    own_devices: what ``"auto"`` chooses from, one for each process; None for the devices of this machine.
    """
    placed = place_bundle(bundle, options.load, process_count, own_devices)
    return placed, structs.replace(
        options,
        load=placed.options,
        rank_of_stage=placed.processes,
        stage_counts=tuple(len(placed.bundle.stored_stages(number)) for number in range(len(placed.bundle.stages))),
    )


def join_group(
    bundle: Bundle,
    seat: Seat,
    options: GroupOptions,
    check: Callable[[], None] = lambda: None,
    *,
    raises_at_once: bool = False,
) -> Membership:
    """Meet the other processes, load the stages of this one, and connect.

    raises_at_once: the caller tells the others why this process could not load its stages; otherwise all wait for the reports of all.
    """
    with contextlib.closing(LinkListener()) as listener:
        # The front gives up first, and names the processes that are missing.
        seconds = options.processes.start_seconds + (0.0 if seat.rank == FRONT_RANK else _FURTHER_SECONDS)
        identity = own_identity(bundle, seat.size, listener.name, LOOPBACK if options.is_local else options.address)

        def check_identities_and_group(identities: Mapping[int, Identity]) -> None:
            check_identities(identities)  # which says why processes have ended that do not fit
            check()

        identities = seat.exchange_reports("identity", identity, seconds=seconds, check=check_identities_and_group)
        check_identities(dict(enumerate(identities)))
        stages, reports = _load_together(bundle, seat, options, check, raises_at_once=raises_at_once)
        _raise_load_error(reports, identities)
        stage_facts = sorted((facts for report in reports for facts in report.stages), key=lambda facts: facts.stage)
        routes = find_routes(
            bundle.entry_point, options.rank_of_stage, {facts.stage: facts.written_inputs for facts in stage_facts}
        )
        routes = mark_device_routes(routes, stage_facts)
        symbols = bundle.entry_point.symbols
        local_routes = find_local_routes(routes, [identity.machine for identity in identities], symbols)
        address = reachable_address(identity.address, [member.address for member in identities])
        group = ProcessGroup(seat.store, seat.rank, seat.size, address=address, check=check)
        listener_names = [identity.listener for identity in identities]
        links = connect_links(listener, listener_names, seat.rank, routes, local_routes, symbols, check)
        channels = connect_channels(seat, routes, stage_facts, address, check)
    return Membership(
        options=options,
        store=seat.store,
        group=group,
        stages=stages,
        routes=routes,
        connections=Connections(group=group, links=links, channels=channels),
        local_routes=local_routes,
        identities=identities,
        stage_facts=tuple(stage_facts),
    )


def _raise_load_error(reports: Sequence[LoadReport], identities: Sequence[Identity]) -> None:
    """Raise the error of the first process that could not load its stages, with the name of the process."""
    for rank, report in enumerate(reports):
        if report.error is not None:
            load_error = rebuild_error(report.error)
            if isinstance(load_error, StagepackError):
                attribute_error(load_error, f"process {rank} on {identities[rank].host}")
            raise load_error


def _load_together(
    bundle: Bundle, seat: Seat, options: GroupOptions, check: Callable[[], None], *, raises_at_once: bool
) -> tuple[dict[int, LoadedStage], list[LoadReport]]:
    """Load the stages of this process while the others load theirs; return them, and what all processes report."""
    stages: dict[int, LoadedStage] = {}
    with loading_progress(seat, bundle, options.rank_of_stage) as progress:

        def check_and_show(_: Mapping[int, LoadReport]) -> None:
            check()
            progress.poll()

        try:
            with named_errors(bundle.location):  # which differs from machine to machine
                stages, facts = _load_stages(bundle, seat.rank, options, progress.add)
            report = LoadReport(stages=tuple(facts))
        except StagepackError as error:
            if raises_at_once:
                raise
            report = LoadReport(error=report_error(error))
        return stages, seat.exchange_reports("loaded stages", report, seconds=_LOAD_SECONDS, check=check_and_show)


def _load_stages(
    bundle: Bundle, rank: int, options: GroupOptions, progress: ByteProgress
) -> tuple[dict[int, LoadedStage], list[StageFacts]]:
    """Load the stages of a process; no file of others is read."""
    load = options.load
    bundle = open_for_loading(bundle, load.verify)
    loading = Loading(options=load, progress=progress, unchanged=progress)
    prepared_stages = prepare(bundle, loading, stages_of_rank(options.rank_of_stage, rank))
    ready_stages = compile_prepared(bundle, prepared_stages, load)
    stages, facts = {}, []
    for number, prepared_stage in ready_stages.items():
        start_time = time.perf_counter()
        stages[number] = stage = prepared_stage.finish(verify=load.verifies_weights)
        seconds = time.perf_counter() - start_time
        file_names = find_runtime(stage.runtime).stage_files(bundle, number)
        facts.append(
            StageFacts(
                stage=number,
                stored_stages=tuple(bundle.stored_stages(number)),
                rank=rank,
                host=host_name(),
                process_id=os.getpid(),
                runtime=stage.runtime,
                device=str(stage.device),
                files=tuple(file_names),
                bytes_read=sum(bundle.files[file_name].size for file_name in file_names),
                seconds=seconds,
                written_inputs=_written_inputs(bundle, number),
                port=device_port(stage.runtime, stage.device),
            )
        )
    return stages, facts


def _written_inputs(bundle: Bundle, stage_number: int) -> tuple[str, ...]:
    """The inputs of the model whose memory a stage writes."""
    model_inputs = {edge.name for edge in bundle.edges if edge.producer is None}
    stage_inputs = model_inputs.intersection(bundle.stages[stage_number].inputs)
    if not stage_inputs:
        return ()
    return tuple(sorted(stage_inputs & written_inputs(bundle.graph_file(stage_number, module_calls=False).graph)))


class LoadingProgress:
    """Counts what this process reads, and tells the others by their store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._untold_bytes = 0
        self._told_at = -math.inf

    def add(self, byte_count: int) -> None:
        """Count further bytes that this process has read. Several threads may call it."""
        with self._lock:
            self._untold_bytes += byte_count
            if time.monotonic() - self._told_at < _SECONDS_BETWEEN_UPDATES:
                return
            told_bytes, self._untold_bytes = self._untold_bytes, 0
            self._told_at = time.monotonic()
        # The store may have gone: whoever needs it finds that.
        with contextlib.suppress(RuntimeError):
            self._store.add(_PROGRESS_KEY, told_bytes)

    def poll(self) -> None:
        """Tell what was read. The front shows what all processes have read."""
        self.add(0)


class _ShownProgress(LoadingProgress):
    """The progress of the front, which shows the progress of all processes."""

    def __init__(self, store: Store, show_bytes: ByteProgress) -> None:
        super().__init__(store)
        self._show_bytes = show_bytes
        self._shown_bytes = 0
        self._polled_at = time.monotonic()

    def add(self, byte_count: int) -> None:
        self._show_bytes(byte_count)

    def poll(self) -> None:
        if time.monotonic() - self._polled_at >= _SECONDS_BETWEEN_UPDATES:
            self.update()

    def update(self) -> None:
        """Show what all processes have told."""
        self._polled_at = time.monotonic()
        with contextlib.suppress(RuntimeError):
            read_bytes = self._store.add(_PROGRESS_KEY, 0)
            self._show_bytes(read_bytes - self._shown_bytes)
            self._shown_bytes = read_bytes


@contextlib.contextmanager
def loading_progress(seat: Seat, bundle: Bundle, rank_of_stage: Sequence[int]) -> Iterator[LoadingProgress]:
    """Show on the terminal of the front how many bytes the processes have read, while they load their stages."""
    if seat.rank != FRONT_RANK:
        yield LoadingProgress(seat.store)
        return
    read_files = {
        (stage_rank, file_name)
        for stage_rank, stage in zip(rank_of_stage, bundle.stages, strict=True)
        for file_name in stage.weights
    }
    total_bytes = sum(bundle.files[file_name].size for _, file_name in read_files)
    with byte_progress(f"loading {bundle.location}", total_bytes) as show_bytes:
        progress = _ShownProgress(seat.store, show_bytes)
        yield progress
        progress.update()
