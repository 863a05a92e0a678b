"""How the processes of a pipeline find each other and agree that they fit together, by a store of torch.distributed."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

import msgspec
import torch
from msgspec import Struct
from torch.distributed.distributed_c10d import Store

from stagepack.errors import GroupError, first_line
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.error_report import ErrorReport, rebuild_error, report_error
from stagepack_loaders.distributed.link_listener import machine_id
from stagepack_loaders.distributed.process_group import ConnectionLostError, host_name

_POLL_SECONDS = 0.02
_TELL_SECONDS = 0.5
_START_ERROR_TOPIC = "start error"
_LOST_CONNECTION_TOPIC = "lost connection"
Report = TypeVar("Report", bound=Struct)


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
