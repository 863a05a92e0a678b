"""The models of one server, by name."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from stagepack_loaders.serve.errors import Reason, RequestError
from stagepack_loaders.serve.limits import Limits
from stagepack_loaders.serve.metrics import Metrics
from stagepack_loaders.serve.model import Model


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

    def __iter__(self) -> Iterator[Model]:
        """All models."""
        return iter(self._by_name.values())

    @contextlib.contextmanager
    def request(self, name: str, version: str, protocol: str) -> Iterator[tuple[Model, float]]:
        """A request for an inference: gives the model, and the deadline in seconds of `time.monotonic`; counts how it ends.

        Raises:
            RequestError: there is no such model.
        """
        started, known, status = time.monotonic(), "", Reason.HUNG_UP.name
        try:
            model = self.find(name, version)
            known = name
            yield model, started + self.limits.deadline
            status = "OK"
        except RequestError as error:
            status = error.reason.name
            raise
        except Exception:
            status = "BUG"
            raise
        finally:
            self.metrics.requests.labels(known, protocol, status).inc()
            self.metrics.latency.labels(known, protocol).observe(time.monotonic() - started)

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
