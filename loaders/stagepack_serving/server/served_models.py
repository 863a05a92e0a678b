"""The models of one server by name, and the requests to them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_repository import ModelCollector
from stagepack_serving.server.model_versions import ModelVersions
from stagepack_serving.server.request_scope import RequestScope
from stagepack_serving.server.served_model import ServedModel

# A record for each inference at its end, with the fields protocol, model, version, status and seconds.
ACCESS_LOGGER: Final = logging.getLogger("stagepack.access")


class ServedModels:
    """The models of a server. All methods are called in the thread of its event loop.

    Attributes:
        limits: the limits of the server.
        metrics: the metrics of the server.
        is_stopping: whether the server is told to stop.
        has_failed: whether the server stops because a model has ended.
        stopping: set when the server stops to accept requests.
    """

    def __init__(self, limits: ServerLimits, metrics: Metrics) -> None:
        self._by_name: dict[str, ModelVersions] = {}
        self.limits = limits
        self.metrics = metrics
        self.is_stopping = False
        self.has_failed = False
        self.stopping = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()
        metrics.registry.register(ModelCollector(self))

    def __iter__(self) -> Iterator[ServedModel]:
        """All loaded versions of all models."""
        return (model for versions in list(self._by_name.values()) for model in versions)

    @property
    def serving(self) -> list[ServedModel]:
        """The versions that take requests."""
        return [model for versions in self._by_name.values() for model in versions.serving]

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests: the server is not told to stop, and all models answer."""
        return not self.is_stopping and not any(model.unavailable_reason() for model in self.serving)

    def is_model_ready(self, model_name: str, version: str = "") -> bool:
        """Return whether a model answers requests.

        version: the version; empty for the newest.
        """
        return not self.find(model_name, version).unavailable_reason() and not self.is_stopping

    def serve(self, models: Sequence[ServedModel]) -> None:
        """Send requests to new versions."""
        for model in models:
            self._by_name.setdefault(model.name, ModelVersions(model.name)).serve(model)

    def retire(self, models: Sequence[ServedModel]) -> None:
        """Send no new requests and sequences to versions."""
        for model in models:
            self._by_name[model.name].retire(model)

    def remove(self, models: Sequence[ServedModel]) -> None:
        """Forget versions that have finished."""
        for model in models:
            versions = self._by_name[model.name]
            versions.retiring.remove(model)
            if model.version not in [other.version for other in versions]:
                self.metrics.remove_version(model.name, model.version)

    @contextlib.asynccontextmanager
    async def request_scope(self, model_name: str, version: str, protocol: str) -> AsyncIterator[RequestScope]:
        """Bound a request in time and count it; the context lasts from its head to the end of its answer.

        version: the version that the request names; may be empty.
        """
        start_time, scope, status = time.monotonic(), None, RequestStatus.HUNG_UP.name
        deadline = asyncio.timeout(self.limits.deadline)
        self._deadlines.add(deadline)
        try:
            versions = self.find_versions(model_name)
            scope = RequestScope(
                versions=versions,
                requested_version=version,
                deadline=deadline,
                sending_seconds=self.limits.deadline,
            )
            versions.check(version)
            try:
                async with deadline:
                    yield scope
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
            self._record_answer(scope, protocol, status, time.monotonic() - start_time)

    def _record_answer(self, scope: RequestScope | None, protocol: str, status: str, seconds: float) -> None:
        """Count an answer in the metrics and in the statistics of its version, and write its line of the access log."""
        model = None if scope is None else scope.model
        model_name = "" if scope is None else scope.versions.name
        version = "" if model is None else model.version
        if model is not None:
            model.statistics.count_answer(seconds, is_success=status == "OK")
        self.metrics.count_answer(model_name, version, protocol, status, seconds)
        fields = {"protocol": protocol, "model": model_name, "version": version, "status": status, "seconds": seconds}
        values = (protocol, model_name or "-", version or "-", status, 1e3 * seconds)
        ACCESS_LOGGER.info("%s %s %s %s %.1f ms", *values, extra=fields)

    def expire_requests(self) -> None:
        """Set the deadline of all requests in progress to now."""
        for deadline in self._deadlines:
            # Raised for a request that is over.
            with contextlib.suppress(RuntimeError):
                deadline.reschedule(0)

    def statistics(self, model_name: str = "", version: str = "") -> dict[str, Any]:
        """Return what loaded versions have done, as Triton's statistics extension defines it.

        model_name: the name of the model; empty for all.
        version: the version; empty for all.
        """
        if model_name:
            self.find_versions(model_name).check(version)
        return {
            "model_stats": [
                {"name": model.name, "version": model.version, **model.statistics.fields()}
                for model in self
                if model_name in ("", model.name) and version in ("", model.version)
            ]
        }

    def find_versions(self, model_name: str) -> ModelVersions:
        """Return the versions of a model."""
        versions = self._by_name.get(model_name)
        if versions is None:
            served_names = ", ".join(name for name, loaded in self._by_name.items() if loaded.serving) or "none"
            raise RequestError(RequestStatus.NOT_FOUND, f"unknown model {model_name!r}: this server has {served_names}")
        return versions

    def find(self, model_name: str, version: str) -> ServedModel:
        """Return a version of a model that takes requests.

        version: the version; empty for the newest.
        """
        return self.find_versions(model_name).find(version)
