"""The models of one server by name, and the requests to them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metadata import MODEL_VERSION
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.served_model import ServedModel

# A record for each inference at its end, with the fields protocol, model, status and seconds.
ACCESS_LOGGER: Final = logging.getLogger("stagepack.access")


class ServedModels:
    """The models of a server.

    Attributes:
        limits: the limits of the server.
        metrics: the metrics of the server.
        is_stopping: whether the server is told to stop.
        has_failed: whether the server stops because a model has ended.
        stopping: set when the server stops to accept requests.
    """

    def __init__(self, models: list[ServedModel], limits: ServerLimits, metrics: Metrics) -> None:
        """Collect the models.

        Args:
            models: the models; their names differ.
            limits: the limits of the server.
            metrics: the metrics of the server.
        """
        self._by_name = {model.name: model for model in models}
        self.limits = limits
        self.metrics = metrics
        self.is_stopping = False
        self.has_failed = False
        self.stopping = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        """The models."""
        return iter(self._by_name.values())

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests: the server is not told to stop, and all models answer."""
        return not self.is_stopping and not any(model.unavailable_reason() for model in self)

    def repository_index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """Return the entries of the index of models, as Triton's model repository extension defines it.

        Args:
            ready_only: leave out models that answer no requests now.

        Returns:
            For each model its name, version and state, and the reason of the state.
        """
        entries = []
        for model in self:
            reason = "the server is stopping" if self.is_stopping else model.unavailable_reason()
            if not (ready_only and reason):
                state = {"state": "UNAVAILABLE", "reason": reason} if reason else {"state": "READY"}
                entries.append({"name": model.name, "version": MODEL_VERSION, **state})
        return entries

    @contextlib.asynccontextmanager
    async def request_scope(
        self, model_name: str, version: str, protocol: str
    ) -> AsyncIterator[tuple[ServedModel, asyncio.Timeout]]:
        """Bound a request in time and count it in the metrics; the context lasts from its head to the end of its answer.

        Args:
            model_name: the model that the request names.
            version: the version that the request names; may be empty.
            protocol: ``rest`` or ``grpc``, for the metrics.

        Yields:
            The model, and the deadline, which the body may shorten.

        Raises:
            RequestError: the model does not exist, or the deadline passed.
        """
        start_time, known_name, status = time.monotonic(), "", RequestStatus.HUNG_UP.name
        deadline = asyncio.timeout(self.limits.deadline)
        self._deadlines.add(deadline)
        try:
            model = self.find(model_name, version)
            known_name = model_name
            try:
                async with deadline:
                    yield model, deadline
            except TimeoutError:
                raise RequestError(RequestStatus.TOO_LATE, f"{model_name}: no answer before the deadline") from None
            status = "OK"
        except RequestError as error:
            status = error.status.name
            raise
        except Exception:
            status = "BUG"
            raise
        finally:
            self._deadlines.discard(deadline)
            seconds = time.monotonic() - start_time
            self.metrics.requests.labels(known_name, protocol, status).inc()
            self.metrics.request_seconds.labels(known_name, protocol).observe(seconds)
            fields = {"protocol": protocol, "model": known_name, "status": status, "seconds": seconds}
            ACCESS_LOGGER.info("%s %s %s %.1f ms", protocol, known_name or "-", status, 1e3 * seconds, extra=fields)

    def expire_requests(self) -> None:
        """Set the deadline of all requests in progress to now."""
        for deadline in self._deadlines:
            # Raised for a request that is over.
            with contextlib.suppress(RuntimeError):
                deadline.reschedule(0)

    def find(self, model_name: str, version: str) -> ServedModel:
        """Return a model.

        Args:
            model_name: the name of the model.
            version: the version; empty for any.

        Returns:
            The model.

        Raises:
            RequestError: there is no such model or version.
        """
        if model_name not in self._by_name:
            served_names = ", ".join(self._by_name)
            raise RequestError(RequestStatus.NOT_FOUND, f"unknown model {model_name!r}: this server has {served_names}")
        if version not in ("", MODEL_VERSION):
            raise RequestError(
                RequestStatus.NOT_FOUND, f"{model_name}: unknown version {version!r}: there is only {MODEL_VERSION}"
            )
        return self._by_name[model_name]
