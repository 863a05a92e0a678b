"""Measure how long values take from one process of this machine to another: ``python -m`` runs the process that sends them back."""

import os
import statistics
import subprocess
import sys
import time
from typing import Final, NamedTuple

from stagepack.errors import GroupError
from stagepack_loaders.distributed.process_group import LOOPBACK, ConnectionLostError, ProcessGroup, open_store
from stagepack_loaders.distributed.tensor_memory import allocate

# Bytes of a value, and how often it goes back and forth: first some times that do not count.
_SMALL: Final = (64, 200)
_LARGE: Final = (8 * 2**20, 12)
_WARMUP_ROUNDS = 3
_TAG = 1
_END_SECONDS = 5.0


class LinkTimes(NamedTuple):
    """How long a value takes between two processes: ``seconds_per_value + byte_count * seconds_per_byte``."""

    seconds_per_value: float
    seconds_per_byte: float


def measure_link() -> LinkTimes:
    """Measure transfers between this process and one that is started for it.

    Returns:
        The medians of several transfers.

    Raises:
        GroupError: the other process has ended.
    """
    store = open_store()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    program = [sys.executable, "-m", __name__, str(store.port)]
    process = subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - this Python
    try:
        group = ProcessGroup(store, 0, 2, address=LOOPBACK)
        (small_bytes, _), (large_bytes, _) = _SMALL, _LARGE
        small_seconds, large_seconds = (_one_way_seconds(group, *size) for size in (_SMALL, _LARGE))
        process.wait(_END_SECONDS)
    except (ConnectionLostError, subprocess.TimeoutExpired) as error:
        raise GroupError(f"the process that transfers were measured with is lost: {error}") from None
    finally:
        process.kill()
        process.wait()
    seconds_per_byte = max(large_seconds - small_seconds, 0.0) / (large_bytes - small_bytes)
    return LinkTimes(small_seconds, seconds_per_byte)


def _one_way_seconds(group: ProcessGroup, byte_count: int, rounds: int) -> float:
    memory = allocate(byte_count)
    seconds = []
    for _ in range(_WARMUP_ROUNDS + rounds):
        start_time = time.perf_counter()
        group.send(memory, 1, _TAG).wait()
        group.receive(memory, 1, _TAG).wait()
        seconds.append((time.perf_counter() - start_time) / 2)
    return statistics.median(seconds[_WARMUP_ROUNDS:])


def send_back(port: int) -> None:
    """Send back what `measure_link` sends.

    Args:
        port: the port of its store.
    """
    group = ProcessGroup(open_store(port=port), 1, 2, address=LOOPBACK)
    for byte_count, rounds in (_SMALL, _LARGE):
        memory = allocate(byte_count)
        for _ in range(_WARMUP_ROUNDS + rounds):
            group.receive(memory, 0, _TAG).wait()
            group.send(memory, 0, _TAG).wait()


if __name__ == "__main__":
    send_back(int(sys.argv[1]))
