"""Gives memory that the process has freed back to the system. The C library keeps it: 300 MB after 500 requests of 1 MB, 250 at a time."""

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from typing import Final

from stagepack_serving.server.model_registry import ModelRegistry

# Functions of glibc, which other C libraries lack.
_MALLOC_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
_MALLOPT: Final = getattr(ctypes.CDLL(None), "mallopt", None)
_M_ARENA_MAX: Final = -8  # of malloc.h
# As is usual for servers in Python, of which one thread at a time runs.
_ARENA_COUNT: Final = 2
_QUIET_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 0.2
_MANY_OBJECTS: Final = 25_000
# Memory waits this long for clients that keep their calls idle to go away.
_MOST_OBJECTS_SECONDS: Final = 10


def limit_arenas() -> None:
    """Let threads share what the C library keeps for them. Of each arena but the main one it gives back only a part.

    With an arena for each thread, 500 requests of 1 MB, 100 at a time, left 110 MB for good. An operator sets another number by
    ``MALLOC_ARENA_MAX``.
    """
    if _MALLOPT is not None and "MALLOC_ARENA_MAX" not in os.environ:
        _MALLOPT(_M_ARENA_MAX, _ARENA_COUNT)


def give_back_memory() -> None:
    """Give back what is free. It takes about a millisecond for each 10 MB, in which other threads may wait for memory."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


class EndedVersions:
    """The versions of bundles that have ended, or were refused. Their graphs, threads, weights and tracebacks refer to each other."""

    def __init__(self) -> None:
        self._first_end: float | None = None
        # Objects that were there at the start or after the last collection, and those of versions loaded since: they do not go away as
        # objects of clients do. A Llama of 48 layers has 21,000: each load after an unload of it waited 10 s for them.
        self._own_objects = 0

    @property
    def hold_memory(self) -> bool:
        """Whether their memory is not free yet."""
        return self._first_end is not None

    def add(self) -> None:
        """Add one that has ended now."""
        self._first_end = self._first_end or time.monotonic()

    def begin(self) -> None:
        """Take all objects that are there for those of versions: clients have not come yet."""
        self._own_objects = _object_count()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context in which a version is loaded, or refused."""
        former = _object_count()
        try:
            yield
        finally:
            self._own_objects += max(0, _object_count() - former)

    async def free_memory(self) -> None:
        """Free their memory, if the garbage collector takes long, for which all threads wait, only after some seconds."""
        if self._first_end is None:
            return
        seconds = time.monotonic() - self._first_end
        # An error of a version has its weights until it is answered.
        if seconds > _MOST_OBJECTS_SECONDS or (seconds > _ANSWER_SECONDS and not _has_many_objects(self._own_objects)):
            self._first_end = None
            self._own_objects = await asyncio.to_thread(_collect_and_give_back)


def _has_many_objects(own_objects: int = 0) -> bool:
    """Whether the garbage collector would take long for objects of clients.

    A thousand idle calls of gRPC are 100,000 objects: 30 to 65 ms, and 100 to 180 ms on a busy machine. To count them takes 1 ms.
    """
    return _object_count() - own_objects > _MANY_OBJECTS


def _object_count() -> int:
    """How many objects the garbage collector would pass over."""
    # Other threads run when the list is gone. With its reference to a tuple that one of them is making, that thread met a SystemError, in
    # 384 of 1,349 counts.
    return next(map(len, map(gc.get_objects, (None,))))


def _collect_and_give_back() -> int:
    """Collect garbage; return how many objects are left."""
    gc.collect()
    give_back_memory()
    return _object_count()


async def give_back_when_quiet(models: ModelRegistry) -> None:
    """Give memory back whenever requests were answered and none has come for some seconds, until cancelled."""
    given_back_count = 0
    last_count = 0
    while True:
        await asyncio.sleep(_QUIET_SECONDS)
        answer_count = models.metrics.answer_counts.total()
        if answer_count == last_count != given_back_count and not any(
            model.admission.pending_requests for model in models
        ):
            await asyncio.to_thread(give_back_memory)
            given_back_count = answer_count
        last_count = answer_count
