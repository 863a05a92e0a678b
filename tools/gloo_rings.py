"""Groups of gloo with this process and others, for the hand-written side of benchmarks."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from stagepack.torch_internals import gloo_process_group
from stagepack_loaders.distributed.process_group import LOOPBACK, open_store

_TIME_LIMIT = timedelta(seconds=60)


@contextmanager
def started_members(run_member: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Start a process for each of the arguments, which follow the port; yield the group, in which this process is the first."""
    store = open_store(LOOPBACK)
    context = multiprocessing.get_context("spawn")
    members = [context.Process(target=run_member, args=(store.port, *further)) for further in arguments]
    for member in members:
        member.start()
    yield gloo_process_group(store, 0, len(members) + 1, _TIME_LIMIT, LOOPBACK)
    for member in members:
        member.join()


def join_ring(port: int, rank: int, size: int) -> Any:
    """Join the group in a process that was started."""
    return gloo_process_group(open_store(LOOPBACK, port), rank, size, _TIME_LIMIT, LOOPBACK)
