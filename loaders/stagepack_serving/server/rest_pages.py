"""Pages that no inference needs, such as the metrics: however many clients ask for them, they take a small share of the server's time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import Response

from stagepack_serving.server.rest_large_request import PAUSE_SECONDS

# Each page takes about half a millisecond of the event loop.
_PAGE_SECONDS: Final = 0.01
# A page that takes long to make is made again after so many times that time.
_MAKING_PAUSE: Final = 9
# Written in less than half a millisecond.
_WRITTEN_SAMPLES: Final = 32


class PagePace:
    """Keeps pages apart in time, so that the answers of the server come between them."""

    def __init__(self) -> None:
        self._next_time = 0.0

    def keep(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that answers at this pace."""

        async def handle_in_turn(request: Request) -> Response:
            response = await handler(request)
            now = time.monotonic()
            turn_time = max(now, self._next_time)
            self._next_time = turn_time + _PAGE_SECONDS
            await asyncio.sleep(turn_time - now)
            return response

        return handle_in_turn


class SharedPage:
    """A page that is made in a thread, once for all who ask for it meanwhile. It is never older than the request for it."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._next_page: asyncio.Future[bytes] | None = None
        self._next_time = 0.0

    async def content(self) -> bytes:
        """Return the page."""
        if self._next_page is None:
            self._next_page = asyncio.ensure_future(self._make_next())
        return await asyncio.shield(self._next_page)

    async def _make_next(self) -> bytes:
        async with self._making:
            await asyncio.sleep(max(0.0, self._next_time - time.monotonic()))
            self._next_page = None  # who asks from now on gets a newer one
            start_time = time.monotonic()
            try:
                return await asyncio.to_thread(self._make)
            finally:
                end_time = time.monotonic()
                self._next_time = end_time + _MAKING_PAUSE * (end_time - start_time)


class _WithPauses(Collector):
    """The metrics of a registry, with pauses in which other threads have the interpreter: 30 models have 5,000 samples."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = _pausing(metric.samples)  # type: ignore[assignment]  # it is iterated over once
            yield metric


def _pausing(samples: Iterable[Sample]) -> Iterator[Sample]:
    iterator = iter(samples)
    while piece := list(islice(iterator, _WRITTEN_SAMPLES)):
        yield from piece
        time.sleep(PAUSE_SECONDS)


def metrics_page(registry: Collector) -> bytes:
    """Return the page that Prometheus reads."""
    return generate_latest(_WithPauses(registry))
