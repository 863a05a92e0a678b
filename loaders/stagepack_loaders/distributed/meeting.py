"""How the processes of a group find each other and agree that they fit together, by a store of torch.distributed."""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import TypeVar

import msgspec
import torch
from msgspec import Struct
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, and not in its type hints
from torch.distributed.distributed_c10d import PrefixStore, Store

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import GroupError, StageLostError, StagepackError, first_line
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.launch_environment import (
    has_store_of_launcher,
    launched_address,
    launched_port,
    launched_rank,
    launched_size,
    restart_count,
)
from stagepack_loaders.distributed.process_group import ProcessGroup, host_name, machine_id
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.status import ErrorReport, lost_error, rebuild_error, report_error

_POLL_SECONDS = 0.02
_TELL_SECONDS = 0.5
_LISTENER_SECONDS = 0.2
_START_ERROR_TOPIC = "start error"
_LOST_CONNECTION_TOPIC = "lost connection"
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent to it
_STORE_TIMEOUT = timedelta(seconds=60)
Report = TypeVar("Report", bound=Struct)


class Identity(Struct, frozen=True, kw_only=True):
    """What a process is: where it runs, the manifest that it has opened, its versions, and how others reach it."""

    host: str
    process_id: int
    size: int  # of the group that it was started in
    digest: str
    placement: str  # how many stages of the bundle each joined stage has
    adapters: str  # their names and digests, in order: calls have their numbers
    stagepack: str
    torch: str
    machine: str  # of `machine_id`
    listener: str  # the name of its `LinkListener`; empty if it has none
    address: str | None  # None to leave the choice to gloo


class StageFacts(Struct, frozen=True, kw_only=True):
    """A loaded stage.

    Attributes:
        stored_stages: the stages of the bundle that it consists of.
        rank: the number of its process in the group.
        host: the name of the machine of its process.
        process_id: the number of its process there.
        files: the names of the files that were read for it, of `bytes_read` bytes.
        seconds: how long reading its weights took.
        written_inputs: the inputs of the model whose memory it writes.
        port: how its device exchanges values with other processes, by `device_port`; empty if they go by the host.
    """

    stage: int
    rank: int
    host: str
    process_id: int
    runtime: str
    device: str
    stored_stages: tuple[int, ...]
    files: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0
    written_inputs: tuple[str, ...] = ()
    port: str = ""


@dataclass(kw_only=True, eq=False)
class Members:
    """The processes of a group, connected: what each is, by rank, and what it runs, in the order of the stages."""

    store: Store
    group: ProcessGroup
    identities: Sequence[Identity]
    stage_facts: tuple[StageFacts, ...]

    def lost_error(self, rank: int, end_text: str, exit_status: int | None = None) -> StageLostError:
        """Return the error that names a process which is gone."""
        return lost_error(
            rank,
            end_text,
            host=self.identities[rank].host,
            stages=tuple(facts.stage for facts in self.stage_facts if facts.rank == rank),
            stored_stages=self.stored_stages(rank),
            exit_status=exit_status,
        )

    def stored_stages(self, rank: int) -> list[int]:
        """Return the stages of the bundle that a process runs, joined or not."""
        return [number for facts in self.stage_facts if facts.rank == rank for number in facts.stored_stages]


def own_identity(bundle: Bundle, size: int, listener_name: str, address: str | None) -> Identity:
    """Return the identity of this process, which listens by a name for others of its machine, and at an address for others."""
    return Identity(
        host=host_name(),
        process_id=os.getpid(),
        size=size,
        digest=bundle.stored.identity,
        placement=",".join(str(len(bundle.stored_stages(number))) for number in range(len(bundle.stages))),
        adapters=_adapters_text(bundle),
        stagepack=version("stagepack"),
        torch=str(torch.__version__),
        machine=machine_id(),
        listener=listener_name,
        address=address,
    )


def _adapters_text(bundle: Bundle) -> str:
    digests = bundle.adapter_digests if isinstance(bundle, AdaptedBundle) else ()
    return ", ".join(f"{name} {digest}" for name, digest in digests) or "none"


def check_identities(identities: Mapping[int, Identity]) -> None:
    """Check that processes fit to each other, by rank; those that have come so far."""
    first_rank = min(identities)
    first = identities[first_rank]
    for field_name, title, cure in (
        ("size", "number of processes", "start all nodes with the same number, such as --nnodes of torchrun"),
        (
            "digest",
            "bundle, by the digest of its manifest",
            "give all the same one, and load a bundle that was replaced anew",
        ),
        ("placement", "placement of the stages", "give all the same devices, memory and speeds, or --placement"),
        (
            "adapters",
            "list of adapters, by name and digest,",
            "give all the same ones in the same order, and load an adapter that was replaced anew",
        ),
        ("stagepack", "version of stagepack", "install the same one on all nodes"),
        ("torch", "version of torch", "install the same one on all nodes"),
    ):
        for rank, identity in sorted(identities.items()):
            if getattr(identity, field_name) != getattr(first, field_name):
                raise GroupError(
                    f"expected one {title} in all processes: rank {first_rank} on {first.host} has {getattr(first, field_name)}, "
                    f"rank {rank} on {identity.host} has {getattr(identity, field_name)}: {cure}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A process that is to be one of a group: its number, and the store in which all write before they are connected."""

    store: Store
    rank: int
    size: int

    def exchange_reports(
        self,
        topic: str,
        report: Report,
        *,
        seconds: float,
        check: Callable[[Mapping[int, Report]], None] = lambda _: None,
    ) -> list[Report]:
        """Publish a report, and wait for the reports of the others.

        check: called with the reports by rank that have come while some are missing; raises when there is no use in waiting.
        """
        deadline = time.monotonic() + seconds
        content = msgspec.json.encode(report).decode()
        reports = {self.rank: report}
        try:
            published = self.store.compare_set(f"{topic}/{self.rank}", "", content)
            if published.decode() != content:
                raise GroupError(
                    f"expected one process of rank {self.rank}, found two: {content} and {published.decode()}: give each node its own "
                    "rank, such as --node-rank of torchrun"
                )
            while True:
                self._add_reports(topic, reports)
                if len(reports) == self.size:  # whoever has all of them may have ended since, which `check` would find
                    return [reports[rank] for rank in range(self.size)]
                try:
                    check(reports)
                except StagepackError:
                    # Whoever has ended may have done so for a report that has come since, and that says more.
                    if not self._add_reports(topic, reports):
                        raise
                    continue
                if time.monotonic() > deadline:
                    ranks = ", ".join(str(missing) for missing in range(self.size) if missing not in reports)
                    raise GroupError(
                        f"expected {self.size} processes, after {seconds:g} s there is no {topic} of rank {ranks}: start them, or look at "
                        "their output"
                    )
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            raise ConnectionLostError(f"the store of the group has gone: {first_line(error)}") from None

    def _add_reports(self, topic: str, reports: dict[int, Report]) -> bool:
        """Add the reports that have come; return whether there are new ones."""
        report_type = type(reports[self.rank])
        new_ranks = [rank for rank in set(range(self.size)) - set(reports) if self.store.check([f"{topic}/{rank}"])]
        for rank in new_ranks:
            reports[rank] = msgspec.json.decode(self.store.get(f"{topic}/{rank}"), type=report_type)
        return bool(new_ranks)


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
    key = f"{_LOST_CONNECTION_TOPIC}/{rank}"
    thread = threading.Thread(target=_set_quietly, args=(store, key, reason), daemon=True)
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


def chosen_address(target: str) -> str | None:
    """Return the address from which this machine reaches another one. IPv4 goes first, so that all processes choose alike."""
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


def launched_seat(seconds: float, topic: str) -> Seat:
    """Return the seat of a process that a launcher has started.

    The store belongs to the launcher, or to process 0, with names of its own for each start of the processes and for a topic.

    seconds: how long to wait for process 0.
    """
    rank, host, port = launched_rank(), launched_address(), launched_port()
    try:
        has_store = rank == FRONT_RANK and not has_store_of_launcher()
        if not has_store:
            _await_listener(host, port, seconds)
        store = TCPStore(
            host,
            port,
            is_master=has_store,
            wait_for_workers=False,  # the handshake does, and says which one is missing
            timeout=timedelta(seconds=seconds),
            multi_tenant=True,  # the application may have its own process group
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise GroupError(
            f"expected the store of process 0 at {host}:{port}, by MASTER_ADDR and MASTER_PORT, within {seconds:g} s: "
            f"{first_line(error)}: start process 0, or look at its output"
        ) from None
    store.set_timeout(_STORE_TIMEOUT)
    return Seat(PrefixStore(f"stagepack/{restart_count()}/{topic}", store), rank, launched_size())


def _await_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a port accepts connections. torch would wait twice as long, and print a trace of C++ each time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LISTENER_SECONDS)
        else:
            return
