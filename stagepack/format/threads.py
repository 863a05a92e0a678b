"""Threads for work that releases the GIL, such as reading and hashing."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cpu_count() -> int:
    """Return the number of processors that this process may run on, at least 1."""
    # Not os.cpu_count: a container or taskset may allow fewer.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of a function for several items, in their order, computed by as many threads as there are processors."""
    if len(items) < 2:
        return [function(item) for item in items]
    # The import takes 20 ms, which opening a bundle does not need.
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    with ThreadPoolExecutor(min(usable_cpu_count(), len(items))) as pool:
        return list(pool.map(function, items))
