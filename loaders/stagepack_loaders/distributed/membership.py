"""Become one of the processes of a pipeline: meet the others, load the own stages, connect.

- How the processes of a pipeline find each other and agree that they fit together, by a store of torch.distributed.
- The address of this machine that the other processes of a group reach.
"""

# Long because the processes join in three rounds, whose messages depend on each other.

import contextlib
import copy
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import msgspec
import torch
from msgspec import Struct
from torch.distributed.distributed_c10d import Store

from stagepack.errors import GroupError, OptionError, StagepackError, first_line
from stagepack.format.aliasing import written_inputs
from stagepack.format.chunks import ByteProgress
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Compile, LoadedStage, PreparedStage, PrepareOptions, Verify
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.distributed import DEFAULT_IN_FLIGHT
from stagepack_loaders.distributed.error_report import ErrorReport, rebuild_error, report_error, stages_text
from stagepack_loaders.distributed.local_links import (
    LinkListener,
    LocalLinks,
    connect_links,
    find_local_routes,
    machine_id,
)
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, host_name
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError, Route, find_routes
from stagepack_loaders.distributed.status import loading_progress
from stagepack_loaders.placement import place_stages
from stagepack_loaders.preparation import compile_prepared, open_for_loading, prepare_stage, runtime_of_each_stage
from stagepack_loaders.registry import find_runtime

_POLL_SECONDS = 0.02
_TELL_SECONDS = 0.5
_START_ERROR_TOPIC = "start error"
_LOST_CONNECTION_TOPIC = "lost connection"
Report = TypeVar("Report", bound=Struct)
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent to it
# Weights may take long to read; a process that ends meanwhile is found by the launcher.
_LOAD_SECONDS = 24 * 3600.0
# How much longer than the front the other processes wait for all to come.
_FURTHER_SECONDS = 2.0


class Identity(Struct, frozen=True, kw_only=True):
    """What a process is.

    Attributes:
        host: the name of its machine.
        process_id: its number there.
        digest: the digest of the manifest that it has opened.
        stagepack: its version of stagepack.
        torch: its version of torch.
        machine: its `machine_id`.
        listener: the name of its `LinkListener`; empty if it has none.
        address: the address of its machine that it has chosen; None to leave the choice to gloo.
    """

    host: str
    process_id: int
    digest: str
    stagepack: str
    torch: str
    machine: str
    listener: str
    address: str | None


class StageFacts(Struct, frozen=True, kw_only=True):
    """A loaded stage.

    Attributes:
        stage: its number.
        rank: the number of its process in the group.
        host: the name of the machine of its process.
        process_id: the number of its process there.
        runtime: the name of its runtime.
        device: its device.
        files: the names of the files that were read for it.
        bytes_read: their bytes.
        seconds: how long reading its weights took.
        written_inputs: the inputs of the model whose memory it writes.
    """

    stage: int
    rank: int
    host: str
    process_id: int
    runtime: str
    device: str
    files: tuple[str, ...]
    bytes_read: int
    seconds: float
    written_inputs: tuple[str, ...]


class LoadReport(Struct, frozen=True, kw_only=True):
    """What a process has loaded.

    Attributes:
        stages: its stages.
        error: why they could not be loaded; None if they were.
    """

    stages: tuple[StageFacts, ...] = ()
    error: ErrorReport | None = None


def own_identity(bundle: Bundle, listener_name: str, address: str | None) -> Identity:
    """Return the identity of this process, which listens by a name for others of its machine, and at an address for others."""
    return Identity(
        host=host_name(),
        process_id=os.getpid(),
        digest=bundle.identity,
        stagepack=version("stagepack"),
        torch=str(torch.__version__),
        machine=machine_id(),
        listener=listener_name,
        address=address,
    )


def exchange_identities(
    store: Store, rank: int, size: int, identity: Identity, *, seconds: float, check: Callable[[], None]
) -> list[Identity]:
    """Tell the others what this process is, and wait for them.

    seconds: how long to wait for the others.
    """
    identities = exchange_reports(store, "identity", rank, size, identity, seconds=seconds, check=check)
    check_identities(identities)
    return identities


def check_identities(identities: Sequence[Identity]) -> None:
    """Check that processes fit to each other."""
    for field_name, title in (
        ("digest", "bundle, by the digest of its manifest"),
        ("stagepack", "version of stagepack"),
        ("torch", "version of torch"),
    ):
        first = getattr(identities[0], field_name)
        for other_rank, other in enumerate(identities):
            if getattr(other, field_name) != first:
                raise GroupError(
                    f"expected one {title} in all processes: rank 0 on {identities[0].host} has {first}, rank {other_rank} on "
                    f"{other.host} has {getattr(other, field_name)}: give all the same one, and load a bundle that was replaced anew"
                )


def exchange_reports(
    store: Store,
    topic: str,
    rank: int,
    size: int,
    report: Report,
    *,
    seconds: float,
    check: Callable[[], None],
) -> list[Report]:
    """Publish a report, and wait for those of the others."""
    deadline = time.monotonic() + seconds
    try:
        store.set(f"{topic}/{rank}", msgspec.json.encode(report).decode())
        missing = list(range(size))
        while missing := [other for other in missing if not store.check([f"{topic}/{other}"])]:
            check()
            if time.monotonic() > deadline:
                raise GroupError(_missing_text(topic, missing, size, seconds))
            time.sleep(_POLL_SECONDS)
        contents = [store.get(f"{topic}/{other}") for other in range(size)]
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        raise ConnectionLostError(f"the store of the group has gone: {first_line(error)}") from None
    return [msgspec.json.decode(content, type=type(report)) for content in contents]


def tell_start_error(store: Store, rank: int, error: Exception) -> None:
    """Tell the front why this process cannot meet the others."""
    _set_quietly(store, f"{_START_ERROR_TOPIC}/{rank}", msgspec.json.encode(report_error(error)).decode())


def find_start_error(store: Store, rank: int) -> Exception | None:
    """Return why a process could not meet the others, if it has told."""
    content = _find_value(store, f"{_START_ERROR_TOPIC}/{rank}")
    return None if content is None else rebuild_error(msgspec.json.decode(content, type=ErrorReport))


def tell_lost_connection(store: Store, rank: int, reason: str) -> None:
    """Tell the front that this process ends because it has lost another one, and why. Its own connections break too, and look the same.

    Waits a moment only, since the store may have gone.
    """
    thread = threading.Thread(
        target=_set_quietly, args=(store, f"{_LOST_CONNECTION_TOPIC}/{rank}", reason), daemon=True
    )
    thread.start()
    thread.join(_TELL_SECONDS)


def find_lost_connection(store: Store, rank: int) -> str | None:
    """Return why a process has lost its connection to another one, if it has told that it ends because of that."""
    return _find_value(store, f"{_LOST_CONNECTION_TOPIC}/{rank}")


def _find_value(store: Store, key: str) -> str | None:
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def _set_quietly(store: Store, key: str, value: str) -> None:
    with contextlib.suppress(RuntimeError):
        store.set(key, value)


def _missing_text(topic: str, missing: Sequence[int], size: int, seconds: float) -> str:
    ranks = ", ".join(map(str, missing))
    return f"expected {size} processes, after {seconds:g} s there is no {topic} of rank {ranks}: start them, or look at their output"


def chosen_address(target: str) -> str | None:
    """Return the address from which this machine reaches another one.

    IPv4 goes first, so that all processes choose alike.
    """
    return None if os.environ.get(_INTERFACE_VARIABLE) else _address_towards(target)


def reachable_address(address: str | None, other_addresses: Iterable[str | None]) -> str | None:
    """Return the address of this machine that all other processes of a group reach.

    The name of a machine stands for a loopback address in its own ``/etc/hosts`` on Debian. A process that has such an address takes that
    from which it reaches the processes on other machines.

    address: the address that this process has chosen so far; None to leave the choice to gloo.
    """
    if address is None or not _is_loopback(address):
        return address
    for other_address in other_addresses:
        if other_address and not _is_loopback(other_address):
            return _address_towards(other_address)
    return address


def _address_towards(target: str) -> str | None:
    try:
        found = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, socket_address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(socket_address)  # of a datagram socket: chooses the route, and sends nothing
            except OSError:
                continue
            address: str = probe.getsockname()[0]
            return address
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class GroupOptions(Struct, frozen=True, kw_only=True):
    """How a pipeline is distributed, alike in all its processes.

    Attributes:
        rank_of_stage: the process that runs each stage; empty before it is known, see `over_processes`.
        devices: as for `stagepack.load`.
        runtime: as for `stagepack.load`.
        allow_ops: as for `stagepack.load`.
        verify: as for `stagepack.load`.
        copy: as for `stagepack.load`.
        compile: as for `stagepack.load`.
        compiled: as for `stagepack.load`.
        in_flight: the largest number of requests on their way.
        start_seconds: how long to wait for the other processes to come.
        stall_seconds: after how long without an answer a process is taken for lost; None for never.
        is_local: all processes are on this machine, and listen on its loopback interface alone.
        address: where they are not, the address of the machine of this process, by which the others reach it; None for that of the name
            of its host. The one option that is not alike in all processes.
    """

    rank_of_stage: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    runtime: str | tuple[str, ...] = "torch"
    allow_ops: tuple[str, ...] = ()
    verify: Verify = "full"
    copy: bool = False
    compile: Compile = False
    compiled: str | None = None
    in_flight: int = DEFAULT_IN_FLIGHT
    start_seconds: float = 60.0
    stall_seconds: float | None = None
    is_local: bool = False
    address: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Membership:
    """A process that is connected to all others.

    Attributes:
        options: how the pipeline is distributed.
        store: where the processes found each other.
        group: the connections.
        stages: the loaded stages of this process, by stage number.
        routes: the routes of the pipeline.
        links: the connections to processes of the same machine.
        local_routes: the routes between processes of one machine.
        identities: what each process is, by rank.
        reports: what each process has loaded, by rank.
    """

    options: GroupOptions
    store: Store
    group: ProcessGroup
    stages: Mapping[int, LoadedStage]
    routes: tuple[Route, ...]
    links: LocalLinks
    local_routes: frozenset[Route]
    identities: Sequence[Identity]
    reports: Sequence[LoadReport]

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """What the processes have loaded, in the order of the stages."""
        facts = (stage for report in self.reports for stage in report.stages)
        return tuple(sorted(facts, key=lambda stage: stage.stage))

    @property
    def process_names(self) -> dict[int, str]:
        """The rank, host and stages of each process for people, by rank."""
        stages_of_rank: dict[int, list[int]] = {rank: [] for rank in range(self.group.size)}
        for facts in self.stage_facts:
            stages_of_rank[facts.rank].append(facts.stage)
        return {
            rank: f"process {rank} on {self.identities[rank].host}, {stages_text(stages) if stages else 'the caller'}"
            for rank, stages in stages_of_rank.items()
        }

    def abort(self) -> None:
        """Close all connections. Whatever waits for another process, here or there, ends with `ConnectionLostError`."""
        self.links.abort()
        self.group.abort()

    def close(self) -> None:
        """Close all connections, and that to the store, when no thread uses them."""
        self.links.close()
        self.group.close()
        self.store = None  # type: ignore[assignment] # nothing looks for it any more


def absolute_bundle(bundle: Bundle) -> Bundle:
    """Return the bundle by its absolute path: processes read it later, when this one may have another current folder."""
    if bundle.path.is_absolute():
        return bundle
    absolute = copy.copy(bundle)
    absolute.path = bundle.path.absolute()
    return absolute


def group_options(
    *,
    devices: Iterable[object],
    runtime: str | Iterable[str],
    allow_ops: Iterable[str],
    verify: Verify,
    copy: bool,
    compile: Compile,
    compiled: str | os.PathLike[str] | None,
    in_flight: int,
    limits: Limits,
    start_seconds: float = 60.0,
) -> GroupOptions:
    """Return options as callers give them; which processes there are is not known yet."""
    return GroupOptions(
        devices=tuple(map(str, devices)),
        runtime=runtime if isinstance(runtime, str) else tuple(runtime),
        allow_ops=tuple(allow_ops),
        verify=verify,
        copy=copy,
        compile=compile,
        compiled=None if compiled is None else os.path.abspath(compiled),
        in_flight=in_flight,
        stall_seconds=limits.stall_seconds,
        start_seconds=start_seconds,
    )


def check_options(options: GroupOptions, max_restarts: int = 0, microbatch_size: int | None = None) -> None:
    """Check options that callers give, before a process is started."""
    try:
        msgspec.convert(msgspec.to_builtins(options), GroupOptions)
    except (msgspec.ValidationError, TypeError) as error:
        raise OptionError(str(error)) from None
    for name, value, least in (
        ("in_flight", options.in_flight, 1),
        ("max_restarts", max_restarts, 0),
        ("microbatch_size", 1 if microbatch_size is None else microbatch_size, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{name}: expected a number of at least {least}, found {value!r}")
    if not options.start_seconds > 0:
        raise OptionError(f"start_seconds: expected more than 0 seconds, found {options.start_seconds!r}")


def join_group(
    bundle: Bundle, store: Store, rank: int, size: int, options: GroupOptions, check: Callable[[], None] = lambda: None
) -> Membership:
    """Meet the other processes, load the stages of this one, and connect."""
    with contextlib.closing(LinkListener()) as listener:
        # The front gives up first, and names the processes that are missing.
        seconds = options.start_seconds + (0.0 if rank == FRONT_RANK else _FURTHER_SECONDS)
        identity = own_identity(bundle, listener.name, LOOPBACK if options.is_local else options.address)
        identities = exchange_identities(store, rank, size, identity, seconds=seconds, check=check)
        stage_numbers = [number for number, stage_rank in enumerate(options.rank_of_stage) if stage_rank == rank]
        stages: dict[int, LoadedStage] = {}
        with loading_progress(store, rank, bundle, options.rank_of_stage) as progress:

            def check_and_show() -> None:
                check()
                progress.poll()

            try:
                stages, facts = _load_stages(bundle, stage_numbers, options, progress.add)
                report = LoadReport(stages=tuple(facts))
            except StagepackError as error:
                report = LoadReport(error=report_error(error))
            reports = exchange_reports(
                store, "loaded stages", rank, size, report, seconds=_LOAD_SECONDS, check=check_and_show
            )
        for other_report in reports:
            if other_report.error is not None:
                raise rebuild_error(other_report.error)
        written_inputs = {facts.stage: facts.written_inputs for other in reports for facts in other.stages}
        routes = find_routes(bundle.entry_point, options.rank_of_stage, written_inputs)
        symbols = bundle.entry_point.symbols
        local_routes = find_local_routes(routes, [identity.machine for identity in identities], symbols)
        address = reachable_address(identity.address, [member.address for member in identities])
        group = ProcessGroup(store, rank, size, address=address, check=check)
        listener_names = [identity.listener for identity in identities]
        links = connect_links(listener, listener_names, rank, routes, local_routes, symbols, check)
    return Membership(
        options=options,
        store=store,
        group=group,
        stages=stages,
        routes=routes,
        links=links,
        local_routes=local_routes,
        identities=identities,
        reports=reports,
    )


def _load_stages(
    bundle: Bundle, stage_numbers: Sequence[int], options: GroupOptions, progress: ByteProgress
) -> tuple[dict[int, LoadedStage], list[StageFacts]]:
    """Load some stages; no file of others is read."""
    runtimes = runtime_of_each_stage(options.runtime, bundle)
    devices = place_stages(bundle.entry_point, options.devices)
    bundle = open_for_loading(bundle, options.verify)
    prepare_options = PrepareOptions(
        allow_ops=options.allow_ops, copy=options.copy, progress=progress, unchanged=progress
    )
    prepared_stages: dict[int, PreparedStage] = {
        number: prepare_stage(bundle, number, devices[number], runtimes[number].name, prepare_options)
        for number in stage_numbers
    }
    ready_stages = compile_prepared(bundle, prepared_stages, options.compile, options.compiled)
    stages, facts = {}, []
    for number, prepared_stage in ready_stages.items():
        start_time = time.perf_counter()
        stages[number] = stage = prepared_stage.finish(verify=options.verify == "full")
        seconds = time.perf_counter() - start_time
        file_names = find_runtime(stage.runtime).stage_files(bundle, number)
        facts.append(
            StageFacts(
                stage=number,
                rank=options.rank_of_stage[number],
                host=host_name(),
                process_id=os.getpid(),
                runtime=stage.runtime,
                device=str(stage.device),
                files=tuple(file_names),
                bytes_read=sum(bundle.files[file_name].size for file_name in file_names),
                seconds=seconds,
                written_inputs=_written_inputs(bundle, number),
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
