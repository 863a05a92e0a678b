"""The default process group of torch, made so that a process that is lost meanwhile is named."""

import contextlib
import time
from typing import Any

import msgspec
import torch
import torch.distributed
from msgspec import Struct

from stagepack.errors import StageLostError, first_line
from stagepack_loaders.distributed.launch_environment import (
    has_launcher,
    launched_address,
    launched_rank,
    launched_size,
)
from stagepack_loaders.distributed.meeting import exchange_reports, launched_store
from stagepack_loaders.distributed.process_group import finished, host_name
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.status import ProcessLost
from stagepack_loaders.distributed.watch import SilenceClock
from stagepack_loaders.train.torch_meeting import KnownProcesses

_START_SECONDS = 300.0
_CHECK_SECONDS = 0.1
# How long process 0, which may have the store, lets the others read which process is gone.
_TELL_SECONDS = 1.0
_CONNECTED, _LOST = b"connected", "lost"


class _Presence(Struct, frozen=True, kw_only=True):
    """A process that has come, on a machine."""

    host: str


def make_default_group(known_processes: KnownProcesses, silence_seconds: float) -> None:
    """Make the default process group of torch, and note the machines of the processes.

    By itself, torch 2.13 finds in the store of torchrun the addresses of processes that are gone, after these were started again.

    silence_seconds: how long a process may show no sign of life, in seconds.
    """
    if not has_launcher():  # one process, such as that of a debugger
        store_in_memory = torch.distributed.HashStore()  # type: ignore[attr-defined] # documented, and exported at run time
        torch.distributed.init_process_group(_backends(), store=store_in_memory, rank=0, world_size=1)
        return
    rank, size = launched_rank(), launched_size()
    known_processes.hosts[FRONT_RANK] = launched_address()
    store: Any = launched_store(rank, _START_SECONDS, "training")
    # Another connection: one on which a thread waits lets no other one in. The group keeps the store itself, which may be the server. It is
    # made before the reports: a process that has reported may be lost, and its store with it, and a new connection waits for minutes then.
    sign_store = store.clone()
    try:
        presence = _Presence(host=host_name())
        processes = exchange_reports(store, "sign of life", rank, size, presence, seconds=_START_SECONDS)
    except ConnectionLostError as error:
        raise known_processes.store_error(error) from None
    known_processes.hosts.update({process_rank: process.host for process_rank, process in enumerate(processes)})
    _connect(store, _SignsOfLife(sign_store, rank, size, known_processes, silence_seconds), silence_seconds)


def _backends() -> str:
    """Those for the host and for the GPUs of this machine: by itself, torch makes none for the host where there is a GPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        return "cpu:gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"


def _connect(store: Any, signs: "_SignsOfLife", silence_seconds: float) -> None:
    """Make the group. The processes show signs of life in the store meanwhile: torch would wait half an hour for one that is gone."""
    rank, size = launched_rank(), launched_size()
    try:
        finished(
            lambda: torch.distributed.init_process_group(_backends(), store=store, rank=rank, world_size=size),
            signs.check,
        )
    except RuntimeError as error:
        deadline = time.monotonic() + 2 * silence_seconds
        while time.monotonic() < deadline:
            signs.check()
            time.sleep(_CHECK_SECONDS)
        raise StageLostError(f"a process of the training is lost: {first_line(error)}") from None
    signs.finish()


class _SignsOfLife:
    """What the processes write into the store again and again until they are connected."""

    def __init__(
        self, store: Any, rank: int, size: int, known_processes: KnownProcesses, silence_seconds: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._known_processes = known_processes
        self._silence_seconds = silence_seconds
        self._sign_count = 0
        self._signs = dict.fromkeys(set(range(size)) - {rank}, b"")
        self._silence = SilenceClock(self._signs, silence_seconds)

    def check(self) -> None:
        """Give a sign, and look for those of the others."""
        try:
            self._exchange()
            if self._store.check([_LOST]):
                raise msgspec.json.decode(self._store.get(_LOST), type=ProcessLost).rebuild()
            for rank, _ in self._silence.find_silent():
                raise self._tell(rank)
        except RuntimeError as error:
            raise self._known_processes.store_error(error) from None

    def finish(self) -> None:
        """This process is connected."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"sign/{self._rank}", _CONNECTED.decode())

    def _exchange(self) -> None:
        self._sign_count += 1
        self._store.set(f"sign/{self._rank}", str(self._sign_count))
        for rank, last_sign in self._signs.items():
            sign = self._store.get(f"sign/{rank}") if self._store.check([f"sign/{rank}"]) else b""
            if sign and (sign == _CONNECTED or sign != last_sign):
                self._signs[rank] = sign
                self._silence.hear(rank)

    def _tell(self, rank: int) -> StageLostError:
        """Tell the others which process is gone, before the store of this one may go too."""
        lost = self._known_processes.lost_error(rank, f"it has shown no sign of life for {self._silence_seconds:g} s")
        self._store.set(_LOST, msgspec.json.encode(ProcessLost.of(lost)).decode())
        time.sleep(_TELL_SECONDS if self._rank == FRONT_RANK else 0)
        return lost
