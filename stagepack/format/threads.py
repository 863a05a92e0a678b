"""Threads for work that releases the GIL, such as reading and hashing."""

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from stagepack.format.control_groups import cpu_quota

if TYPE_CHECKING:
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cpu_count() -> int:
    """Return the number of processors that this process may run on, at least 1: a quota of 1.5 counts as 2."""
    return max(1, math.ceil(usable_cpus()))


def usable_cpus() -> float:
    """Return how many processors this process may use at a time, such as 1.5."""
    # Not os.cpu_count: a container or taskset may allow fewer.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _own_quota())


@functools.cache
def _own_quota() -> float:
    """The quota of processors when it was first asked for: reading it takes 0.3 ms."""
    quota = cpu_quota()
    return 2.0**31 if quota is None else quota


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of a function for several items, in their order, computed by as many threads as there are processors."""
    if len(items) < 2:
        return [function(item) for item in items]
    # The import takes 20 ms, which opening a bundle does not need.
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    with ThreadPoolExecutor(min(usable_cpu_count(), len(items))) as pool:
        return list(pool.map(function, items))


def ordered_results(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of a function for items, in their order. Threads are at most two results each ahead of the caller."""
    from concurrent.futures import Future, ThreadPoolExecutor  # noqa: PLC0415 - as above

    thread_count = usable_cpu_count()
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(thread_count) as pool:
        try:
            for item in items:
                if len(running) > thread_count:
                    yield running.popleft().result()
                running.append(pool.submit(function, item))
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def start_in_thread(function: Callable[[], Result], thread_name: str) -> "Future[Result]":
    """Call a function in a thread of its own, which does not keep the process alive; return its result to come."""
    from concurrent.futures import Future  # noqa: PLC0415 - as above

    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()  # a caller that waits no more does not end the thread, whose result is then dropped

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            result.set_exception(error)

    threading.Thread(target=run, name=thread_name, daemon=True).start()
    return result
