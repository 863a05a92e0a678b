"""The models of one server, by name."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.limits import Limits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model import Model


class Models:
    """All that a server serves.

    Attributes:
        limits: what it takes on.
        metrics: what it counts.
        stopping: set when it takes no more requests.
        ready: whether it wants requests; not any more when it was told to stop.
    """

    def __init__(self, models: list[Model], limits: Limits, metrics: Metrics) -> None:
        """Their names differ."""
        self._by_name = {model.name: model for model in models}
        self.limits = limits
        self.metrics = metrics
        self.ready = True
        self.stopping = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()

    def __iter__(self) -> Iterator[Model]:
        """All models."""
        return iter(self._by_name.values())

    @contextlib.asynccontextmanager
    async def request(self, name: str, version: str, protocol: str) -> AsyncIterator[tuple[Model, asyncio.Timeout]]:
        """A request for an inference, from its begin to its end; gives the model, and the deadline, which may be moved nearer.

        Raises:
            RequestError: there is no such model, or the deadline was missed.
        """
        started, known, status = time.monotonic(), "", Reason.HUNG_UP.name
        deadline = asyncio.timeout(self.limits.deadline)
        self._deadlines.add(deadline)
        try:
            model = self.find(name, version)
            known = name
            try:
                async with deadline:
                    yield model, deadline
            except TimeoutError:
                raise RequestError(Reason.TOO_LATE, f"{name}: no answer before the deadline") from None
            status = "OK"
        except RequestError as error:
            status = error.reason.name
            raise
        except Exception:
            status = "BUG"
            raise
        finally:
            self._deadlines.discard(deadline)
            self.metrics.requests.labels(known, protocol, status).inc()
            self.metrics.latency.labels(known, protocol).observe(time.monotonic() - started)

    def give_up(self) -> None:
        """Let no request that is under way take longer."""
        for deadline in self._deadlines:
            with contextlib.suppress(RuntimeError):  # it is over
                deadline.reschedule(0)

    def find(self, name: str, version: str) -> Model:
        """The model of a name; the version may be left empty.

        Raises:
            RequestError: there is none.
        """
        if name not in self._by_name:
            raise RequestError(Reason.NOT_FOUND, f"unknown model {name!r}: this server has {', '.join(self._by_name)}")
        if version not in ("", Model.version):
            raise RequestError(Reason.NOT_FOUND, f"{name}: there is no version {version!r}: there is {Model.version}")
        return self._by_name[name]
