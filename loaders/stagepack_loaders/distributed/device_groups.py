"""Values between devices of two processes: a group of torch.distributed for each route, which copies them without the host.

Heads of messages still go by a link or by gloo: they decide the order, say what has failed, and tell that a process is lost.

Backends: NCCL between GPUs, which was not run with two GPUs yet; gloo between processes on the CPU, by which the tests run the same code.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from msgspec import Struct
from torch.distributed.distributed_c10d import PrefixStore, Store, is_nccl_available

from stagepack.errors import GroupError, OptionError
from stagepack.torch_internals import gloo_process_group, nccl_process_group
from stagepack_loaders.distributed.local_links import LocalLinks
from stagepack_loaders.distributed.meeting import Seat, StageFacts
from stagepack_loaders.distributed.process_group import (
    NO_TIMEOUT,
    ProcessGroup,
    Transfer,
    close_connections,
    finished,
    gloo_reason,
    host_name,
)
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError, Route
from stagepack_loaders.distributed.status import ErrorReport, rebuild_error, report_error
from stagepack_loaders.registry import TORCH_RUNTIME

_VARIABLE: Final = "STAGEPACK_NCCL"
_NCCL: Final = "nccl"
_GLOO: Final = "gloo"
_OFF: Final = ("", "0")
# Ranks in the group of a route.
_SOURCE: Final = 0
_TARGET: Final = 1
_TAG: Final = 0
_CONNECT_SECONDS: Final = 120.0
_GLOO_TIMEOUT: Final = timedelta(seconds=12)  # gloo waits five times as long for a connection
_LOGGER = logging.getLogger("stagepack")


def device_port(runtime_name: str, device: Any) -> str:
    """Return the backend and the identity of a device whose values other processes can take from there; empty if they go by the host.

    Raises `OptionError` if the variable has an unknown value, or torch has no NCCL for a GPU.
    """
    setting = os.environ.get(_VARIABLE, "")
    if setting not in (*_OFF, "1", _GLOO):
        raise OptionError(f"{_VARIABLE}: expected 1 or 0, found {setting!r}")
    if runtime_name != TORCH_RUNTIME:
        return ""
    if setting == "1" and device.type == "cuda":
        if not is_nccl_available():
            raise OptionError(f"{_VARIABLE}=1: this build of torch has no NCCL: unset the variable")
        return f"{_NCCL} {torch.cuda.get_device_properties(device).uuid}"
    return f"{_GLOO} {host_name()} {os.getpid()}" if setting == _GLOO and device.type == "cpu" else ""


def mark_device_routes(routes: Sequence[Route], stage_facts: Sequence[StageFacts]) -> tuple[Route, ...]:
    """Return the routes, with a mark on those between stages whose devices exchange values. Computed alike by every process."""
    return tuple(replace(route, joins_devices=_device_ends(route, stage_facts) is not None) for route in routes)


def _device_ends(route: Route, stage_facts: Sequence[StageFacts]) -> tuple[StageFacts, StageFacts] | None:
    """The stages at the two ends of a route whose values go from device to device; None if they go by the host.

    The front takes and gives values on the host. So do two processes on one GPU, which NCCL refuses.
    """
    if route.source_stage is None or route.target_rank == FRONT_RANK:
        return None
    source = stage_facts[route.source_stage]
    numbers = sorted({number for edge in route.edges for number in edge.consumers})
    targets = [stage_facts[number] for number in numbers if stage_facts[number].rank == route.target_rank]
    ports = {facts.port for facts in targets}
    if len(ports) != 1 or "" in ports or source.port in ports or _backend_of(source) != _backend_of(targets[0]):
        return None
    return source, targets[0]


def _backend_of(facts: StageFacts) -> str:
    return facts.port.partition(" ")[0]


class DeviceChannel:
    """Copies the values of one route between the devices of two processes, in the order in which they are sent.

    One thread at a time sends or receives; any thread may call `abort`.
    """

    def __init__(self, backend: Any, rank: int, device: torch.device) -> None:
        self._backend = backend
        self._is_source = rank == _SOURCE
        self._peer = _TARGET if self._is_source else _SOURCE
        self._device = device

    def send(self, bodies: Sequence[torch.Tensor]) -> list[Transfer]:
        """Send contiguous tensors with elements, without waiting until they arrive. They must not change before."""
        # `reshape` and `view` share the memory of a contiguous tensor.
        return [self._begin(self._backend.send, body.to(self._device).reshape(-1).view(torch.uint8)) for body in bodies]

    def receive(self, byte_counts: Sequence[int]) -> list[torch.Tensor]:
        """Return memory of the device with the next values. On a GPU they are there for whatever its stream does next."""
        memories = [torch.empty(byte_count, dtype=torch.uint8, device=self._device) for byte_count in byte_counts]
        for transfer in [self._begin(self._backend.recv, memory) for memory in memories]:
            transfer.wait()
        return memories

    def connect(self) -> None:
        """Exchange a byte with the other process: NCCL connects at the first message, and waits there without end for a lost process."""
        if self._is_source:
            for transfer in self.send([torch.zeros(1, dtype=torch.uint8)]):
                transfer.wait()
        else:
            self.receive([1])
        self.finish()

    def finish(self) -> None:
        """Wait until the device has sent and received everything."""
        if self._uses_stream:
            torch.accelerator.synchronize(self._device)

    def abort(self) -> None:
        """Close the connection. Whatever waits for it, here or there, ends."""
        backend = self._backend
        with contextlib.suppress(RuntimeError, AttributeError):  # it is closed
            if self._uses_stream:
                backend.abort()
            else:
                close_connections(
                    [self._peer], lambda rank, tag: backend.recv([torch.empty(1, dtype=torch.uint8)], rank, tag)
                )

    def close(self) -> None:
        """Close the connection, when no thread uses it."""
        if self._uses_stream and self._backend is not None:
            with contextlib.suppress(RuntimeError):  # it was aborted
                self._backend.shutdown()
        self._backend = None

    @property
    def _uses_stream(self) -> bool:
        return self._device.type != "cpu"

    def _begin(self, operation: Callable[..., Any], memory: torch.Tensor) -> Transfer:
        try:
            work = operation([memory], self._peer, _TAG)
        except RuntimeError as error:
            raise ConnectionLostError(gloo_reason(error)) from None
        return _StreamTransfer(work, memory) if self._uses_stream else Transfer(work, memory)


class _StreamTransfer(Transfer):
    """A transfer of NCCL: the current stream waits for it, the host does not, unless it names a time limit."""

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ConnectionLostError(gloo_reason(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The connections of one process: to all others, to those of its machine by route, and between devices by route."""

    group: ProcessGroup
    links: LocalLinks
    channels: Mapping[Route, DeviceChannel]

    def abort(self) -> None:
        """End all connections. Whatever waits for another process, here or there, ends with `ConnectionLostError`."""
        self.links.abort()
        self.group.abort()
        for channel in self.channels.values():
            channel.abort()

    def close(self) -> None:
        """Close all connections, when no thread uses them."""
        for channel in self.channels.values():
            channel.close()
        self.links.close()
        self.group.close()


class _ChannelReport(Struct, frozen=True, kw_only=True):
    """That a process has connected its devices, or why it could not."""

    error: ErrorReport | None = None


def connect_channels(
    seat: Seat,
    routes: Sequence[Route],
    stage_facts: Sequence[StageFacts],
    address: str | None,
    check: Callable[[], None],
) -> dict[Route, DeviceChannel]:
    """Connect the marked routes of a process, all processes in one order, so that none waits for another in a circle.

    Raises `GroupError` in all processes if two devices cannot be connected.
    """
    channels: dict[Route, DeviceChannel] = {}
    if not any(route.joins_devices for route in routes):
        return channels
    report = _ChannelReport()
    try:
        for route_number, route in enumerate(routes):
            ends, ranks = _device_ends(route, stage_facts), (route.source_rank, route.target_rank)
            if ends is not None and seat.rank in ranks:
                store = PrefixStore(f"devices/{route_number}", seat.store.clone())  # type: ignore[attr-defined] # public
                rank = ranks.index(seat.rank)
                channels[route] = finished(partial(_connect, store, rank, ends[rank], address), check)
    except GroupError as error:
        report = _ChannelReport(error=report_error(error))

    def check_reports(reports: Mapping[int, _ChannelReport]) -> None:
        for other_report in reports.values():
            if other_report.error is not None:
                raise rebuild_error(other_report.error)
        check()

    reports = seat.exchange_reports("device channels", report, seconds=_CONNECT_SECONDS, check=check_reports)
    check_reports(dict(enumerate(reports)))
    _LOGGER.info("process %d: %d routes join devices", seat.rank, len(channels))
    return channels


def _connect(store: Store, rank: int, own: StageFacts, address: str | None) -> DeviceChannel:
    try:
        if _backend_of(own) == _NCCL:
            backend = nccl_process_group(store, rank, 2, NO_TIMEOUT)
        else:
            backend = gloo_process_group(store, rank, 2, _GLOO_TIMEOUT, address)
        channel = DeviceChannel(backend, rank, torch.device(own.device))
        channel.connect()
    except (RuntimeError, ConnectionLostError) as error:
        raise GroupError(
            f"stage {own.stage} on {own.device} of {own.host} has no connection to the device of another process: {gloo_reason(error)}: "
            f"look for processes that have ended and at the log that NCCL_DEBUG=INFO prints, or unset {_VARIABLE}"
        ) from None
    return channel
