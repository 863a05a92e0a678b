"""Measure how long values take from one process of this machine to another: ``python -m`` runs the process that sends them back."""

import contextlib
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import torch

from stagepack.errors import GroupError
from stagepack.partition.profile import LinkTime
from stagepack_loaders.distributed.local_links import LinkListener, connect_links, find_local_routes
from stagepack_loaders.distributed.process_group import (
    LOOPBACK,
    MessageHead,
    ProcessGroup,
    allocate,
    machine_id,
    open_store,
)
from stagepack_loaders.distributed.routes import ConnectionLostError, Route, control_bytes
from stagepack_loaders.python_process import module_command, module_environment

# Bytes of a value, and how often it goes back and forth: first some times that do not count.
_SMALL: Final = (64, 200)
_LARGE: Final = (8 * 2**20, 12)
_WARMUP_ROUNDS = 3
_ROUTES: Final = tuple(Route(source_stage=0, source_rank=rank, target_rank=1 - rank, edges=()) for rank in (0, 1))
_END_KEY: Final = "measured"
_END_SECONDS = 60.0
_CHECK_SECONDS = 0.05


def measure_link() -> LinkTime:
    """Measure transfers between this process and one that is started for it."""
    store = open_store()
    process = subprocess.Popen(  # noqa: S603 - this Python
        module_command(__name__, str(store.port)), env=module_environment(), stdin=subprocess.DEVNULL
    )
    try:
        (small_bytes, _), (large_bytes, _) = _SMALL, _LARGE
        while not store.check(["listener/1"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise GroupError(
                    f"the process that transfers were measured with ended with exit status {process.wait(_CHECK_SECONDS)}"
                )
        with contextlib.closing(_Ends(store, 0)) as ends:
            small_seconds, large_seconds = (_one_way_seconds(ends, *size) for size in (_SMALL, _LARGE))
            store.set(_END_KEY, "")
        process.wait(_END_SECONDS)
    except (ConnectionLostError, subprocess.TimeoutExpired) as error:
        raise GroupError(f"the process that transfers were measured with is lost: {error}") from None
    finally:
        process.kill()
        process.wait()
    seconds_per_byte = max(large_seconds - small_seconds, 0.0) / (large_bytes - small_bytes)
    return LinkTime(seconds_per_value=small_seconds, seconds_per_byte=seconds_per_byte)


class _Ends:
    """The connections of one of the two processes, as a pipeline has them."""

    def __init__(self, store: Any, rank: int) -> None:
        self._sent, self._received = _ROUTES[rank], _ROUTES[1 - rank]
        with contextlib.closing(LinkListener()) as listener:
            store.set(f"listener/{rank}", listener.name)
            names = [store.get(f"listener/{other_rank}").decode() for other_rank in (0, 1)]
            # Last: gloo waits 12 s for the other process, which may take longer to start on a busy machine.
            self._group = ProcessGroup(store, rank, 2, address=LOOPBACK)
            local_routes = find_local_routes(_ROUTES, [machine_id()] * 2, ())
            self._links = connect_links(listener, names, rank, _ROUTES, local_routes, (), lambda: None)

    def send(self, memory: torch.Tensor) -> None:
        if link := self._links.senders.get(self._sent):
            link.send(MessageHead(control_bytes(())).view, [memory])
        else:
            self._group.send(memory, self._sent.target_rank, self._sent.body_tag).wait()

    def receive(self, memory: torch.Tensor) -> None:
        if link := self._links.receivers.get(self._received):
            link.receive()
        else:
            self._group.receive(memory, self._received.source_rank, self._received.body_tag).wait()

    def close(self) -> None:
        self._links.close()


def _one_way_seconds(ends: _Ends, byte_count: int, rounds: int) -> float:
    memory = allocate(byte_count)
    seconds = []
    for _ in range(_WARMUP_ROUNDS + rounds):
        start_time = time.perf_counter()
        ends.send(memory)
        ends.receive(memory)
        seconds.append((time.perf_counter() - start_time) / 2)
    return statistics.median(seconds[_WARMUP_ROUNDS:])


def send_back(port: int) -> None:
    """Send back what `measure_link` sends."""
    store = open_store(port=port)
    with contextlib.closing(_Ends(store, 1)) as ends:
        for byte_count, rounds in (_SMALL, _LARGE):
            memory = allocate(byte_count)
            for _ in range(_WARMUP_ROUNDS + rounds):
                ends.receive(memory)
                ends.send(memory)
        store.get(_END_KEY)  # until then, the other process may still use the connections


if __name__ == "__main__":
    send_back(int(sys.argv[1]))
