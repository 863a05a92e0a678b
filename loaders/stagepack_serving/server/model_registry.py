"""The models that a server has loaded, by name and version, and the requests to them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stagepack_serving.server.access_log import current_record
from stagepack_serving.server.admission import Turns
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics, Timeline
from stagepack_serving.server.parameters import boolean_parameter, seconds_left, shorten_deadline, timeout_parameter
from stagepack_serving.server.version_metrics import version_metrics

if TYPE_CHECKING:
    from stagepack_serving.server.served_model import ServedModel

# Refusals beyond so many a second wait for their turns, for so many seconds at most. Without that, clients that ask again at once take
# the processors that models need.
_REFUSAL_RATE: Final = 100
_LONGEST_REFUSAL_WAIT: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedBundle:
    """A version of a model, or of several models if the bundle has several entry points."""

    version: int
    models: Sequence["ServedModel"]
    end_processes: Callable[[], None]

    @property
    def digest(self) -> str:
        """The digest of the bundle of its newest weights."""
        return self.models[0].bundle.digest

    def close(self, seconds: float) -> bool:
        """Finish the queued calls and end the threads, for which it waits so many seconds; then end the processes."""
        end_time = time.monotonic() + seconds
        is_closed = all([model.close(max(0.0, end_time - time.monotonic())) for model in self.models])
        if is_closed:
            self.end_processes()
        return is_closed


class ModelRegistry(Collector):
    """The loaded models of a server. All methods are called in the thread of its event loop. An empty version is the newest one.

    Attributes:
        limits: the limits of the server.
        metrics: the metrics of the server.
        is_stopping: whether the server is told to stop.
        has_failed: whether the server stops because a model has ended.
        stopping: set when the server stops to accept requests.
        expired_count: the number of requests that were not answered before the end of the drain.
    """

    def __init__(self, limits: ServerLimits, metrics: Metrics) -> None:
        # The versions of each model, the newest last. Those that retire only finish requests and sequences which they have begun.
        self._versions: dict[str, list[ServedModel]] = {}
        self._retiring: set[ServedModel] = set()
        self.limits = limits
        self.metrics = metrics
        self.is_stopping = False
        self.has_failed = False
        self.expired_count = 0
        self.stopping = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()
        self._refusal_turns = Turns(_LONGEST_REFUSAL_WAIT)
        metrics.registry.register(self)

    def __iter__(self) -> Iterator["ServedModel"]:
        """All loaded versions of all models."""
        return (model for versions in list(self._versions.values()) for model in versions)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the loaded versions: asked at each scrape, they hold no version that is closed."""
        yield from version_metrics(self)

    @property
    def serving(self) -> list["ServedModel"]:
        """The versions that take requests."""
        return [model for model in self if model not in self._retiring]

    @property
    def adapter_names(self) -> dict[str, str]:
        """The adapters that requests may choose, each with the name of its model."""
        return {adapter: model.name for model in self.serving for adapter in model.adapters.names}

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests: the server is not told to stop, and all models answer."""
        return not self.is_stopping and not any(model.unavailable_reason() for model in self.serving)

    def is_model_ready(self, model_name: str, version: str = "") -> bool:
        """Return whether a model answers requests."""
        return not self.find_named(model_name, version).unavailable_reason() and not self.is_stopping

    def serve(self, models: Sequence["ServedModel"]) -> None:
        """Send requests to new versions."""
        for model in models:
            model.on_sequence_start = partial(self._end_sequence_elsewhere, model)
            versions = [*self._versions.get(model.name, ()), model]
            self._versions[model.name] = sorted(versions, key=lambda served: int(served.version))

    def retire(self, models: Sequence["ServedModel"]) -> None:
        """Send no new requests and sequences to versions."""
        self._retiring.update(models)

    def remove(self, models: Sequence["ServedModel"]) -> None:
        """Forget versions that have finished."""
        self._retiring.difference_update(models)
        for model in models:
            # Not in place: the metrics are collected in other threads.
            self._versions[model.name] = versions = [
                other for other in self._versions[model.name] if other is not model
            ]
            if model.version not in [other.version for other in versions]:
                self.metrics.remove_version(model.name, model.version)

    def resolve(self, name: str) -> tuple[str, str | None]:
        """Return the name of the model that a client names, and the adapter if it names the model by one of its adapters."""
        if any(model not in self._retiring for model in self._versions.get(name, ())):
            return name, None
        holders = sorted({model.name for model in self.serving if name in model.adapters.names})
        if len(holders) > 1:
            raise BadRequestError(
                f"{name:.100} is an adapter of {', '.join(holders)}: name one of these models, and the adapter in the parameter 'adapter'"
            )
        return (holders[0], name) if holders else (name, None)

    def find_named(self, name: str, version: str) -> "ServedModel":
        """Return a version that takes requests, of a model that is named by itself or by one of its adapters."""
        return self.find(self.resolve(name)[0], version)

    def find(self, model_name: str, version: str) -> "ServedModel":
        """Return a version of a model that takes requests."""
        versions = [model for model in self._versions_of(model_name) if model not in self._retiring]
        for model in reversed(versions):
            if version in ("", model.version):
                return model
        loaded_versions = ", ".join(model.version for model in versions)
        reason = (
            f"version {version!r} is not loaded: there is {loaded_versions}" if versions else "the model is not loaded"
        )
        raise RequestError(RequestStatus.NOT_FOUND, f"{model_name}: {reason}")

    def choose(self, model_name: str, version: str, parameters: Mapping[str, Any]) -> "ServedModel":
        """Return the version that runs a request: the one that has its sequence, or else the one that it asks for.

        When it starts a sequence there, an older one of the same id ends on every version.
        """
        sequence_id = parameters.get("sequence_id")
        for model in self._versions_of(model_name):
            if version in ("", model.version) and model.has_sequence(sequence_id):
                return self.find(model_name, version) if boolean_parameter(parameters, "sequence_start") else model
        return self.find(model_name, version)

    def metadata(self, model_name: str, version: str) -> dict[str, Any]:
        """Return the metadata of a version as the protocol defines it."""
        model = self.find_named(model_name, version)
        return model.metadata([other.version for other in self.serving if other.name == model.name])

    def statistics(self, model_name: str, version: str) -> dict[str, Any]:
        """Return the statistics of loaded versions, by Triton's statistics extension; an empty name means all models."""
        model_name, _ = self.resolve(model_name)
        if model_name:
            self._check_version(model_name, version)
        return {
            "model_stats": [
                {"name": model.name, "version": model.version, **model.statistics.fields()}
                for model in self
                if model_name in ("", model.name) and version in ("", model.version)
            ]
        }

    @contextlib.asynccontextmanager
    async def request_scope(self, model_name: str, version: str, protocol: str) -> AsyncIterator["RequestScope"]:
        """Bound a request in time and count it; the context lasts from its head to the end of its answer."""
        status, scope, timeline = RequestStatus.HUNG_UP.name, None, Timeline()
        if (record := current_record.get()) is not None:
            record.timeline = timeline
        deadline = asyncio.timeout(self.limits.deadline)
        self._deadlines.add(deadline)
        try:
            model_name, adapter = self.resolve(model_name)
            self._versions_of(model_name)
            scope = RequestScope(
                registry=self,
                model_name=model_name,
                version=version,
                adapter=adapter,
                deadline=deadline,
                timeline=timeline,
            )
            self._check_version(model_name, version)
            try:
                async with deadline:
                    yield scope
            except TimeoutError:
                raise RequestError(RequestStatus.TOO_LATE, f"{model_name}: no answer before the deadline") from None
            status = "OK"
        except RequestError as error:
            status = error.status.name
            await self._await_turn(error)
            raise
        except Exception:
            status = "BUG"
            raise
        finally:
            self._deadlines.discard(deadline)
            self._record_answer(scope, protocol, status, timeline.end())
            known_name = "" if scope is None else model_name
            self.metrics.count_parts(
                known_name, "" if scope is None or scope.model is None else scope.model.version, timeline
            )

    async def check_head(self, protocol: str, seconds_left: float, model_name: str = "", version: str = "") -> None:
        """Refuse and count a request of which little but the head is known, if every version that may run it would refuse it.

        model_name: empty if it is not known.
        """
        models = self.named(model_name, version) if model_name else list(self)
        try:
            _check_admission(models, seconds_left)
        except RequestError as error:
            names = {model.name for model in models}
            known_name = names.pop() if len(names) == 1 else ""
            self.metrics.count_answer(known_name, "", protocol, error.status.name)
            if (record := current_record.get()) is not None:
                record.model, record.status = known_name, error.status.name
            await self._await_turn(error)
            raise

    async def _await_turn(self, refusal: RequestError) -> None:
        """Wait before a refusal is sent whose client may ask again at once."""
        if refusal.status.is_temporary:
            await asyncio.sleep(self._refusal_turns.take(1 / _REFUSAL_RATE))

    def expire_requests(self) -> None:
        """Set the deadline of all requests in progress to now."""
        for deadline in self._deadlines:
            # Raised for a request that is over.
            with contextlib.suppress(RuntimeError):
                deadline.reschedule(0)
                self.expired_count += 1

    def begin_answer(self, deadline: asyncio.Timeout) -> None:
        """Let a request whose answer begins have the time that sending takes, also at the end of the drain."""
        self._deadlines.discard(deadline)
        deadline.reschedule(asyncio.get_running_loop().time() + self.limits.sending)

    def _versions_of(self, model_name: str) -> list["ServedModel"]:
        versions = self._versions.get(model_name)
        if versions is None:
            served_names = ", ".join(dict.fromkeys(model.name for model in self.serving)) or "none"
            adapters = f", with the adapters {', '.join(self.adapter_names)}" if self.adapter_names else ""
            raise RequestError(
                RequestStatus.NOT_FOUND, f"unknown model {model_name!r}: this server has {served_names}{adapters}"
            )
        return versions

    def _check_version(self, model_name: str, version: str) -> None:
        """Check that a request may name a version: it takes requests, or has begun sequences that it still finishes."""
        self._versions_of(model_name)
        if not self.named(model_name, version):
            self.find(model_name, version)

    def named(self, model_name: str, version: str) -> list["ServedModel"]:
        """The versions that a request may name, also those that only finish sequences; empty for an unknown name."""
        return [model for model in self._versions.get(model_name, ()) if version in ("", model.version)]

    def _end_sequence_elsewhere(self, holder: "ServedModel", sequence_id: int | str) -> None:
        """End a sequence that has started again in another version."""
        for model in self._versions[holder.name]:
            if model is not holder:
                model.end_sequence(sequence_id)

    def _record_answer(self, scope: "RequestScope | None", protocol: str, status: str, seconds: float) -> None:
        """Count an answer in the metrics and in the statistics of its version, and add them to the record of its request."""
        model = None if scope is None else scope.model
        model_name = "" if scope is None else scope.model_name
        version = "" if model is None else model.version
        if model is not None:
            model.statistics.count_answer(seconds, is_success=status == "OK")
        self.metrics.count_answer(model_name, version, protocol, status, seconds)
        record = current_record.get()
        if record is not None:
            record.model, record.version, record.status = model_name, version, status


@dataclass(slots=True, eq=False, kw_only=True)
class RequestScope:
    """A request, whose model is known before its body is read, and its version after that.

    Attributes:
        version: the version that the request names; may be empty.
        deadline: when its answer must begin; the body may shorten it.
        adapter: the adapter that it names as if it were a model.
        timeline: how long its parts take.
        model: the version that runs it, once it is chosen.
        has_begun: whether a part of its answer was sent.
    """

    registry: ModelRegistry
    model_name: str
    version: str
    deadline: asyncio.Timeout
    timeline: Timeline
    adapter: str | None = None
    model: "ServedModel | None" = None
    has_begun: Callable[[], bool] = lambda: False

    async def begin_answer(self) -> None:
        """Give the answer its time to be sent. Call it before the first byte, as what ends after that is cut off and has no error."""
        await asyncio.sleep(0)  # raises the cancellation of a deadline that has passed
        self.registry.begin_answer(self.deadline)
        self.timeline.enter("send")
        self.has_begun = lambda: True

    @contextlib.contextmanager
    def reserve_place(self, parameters: Mapping[str, Any]) -> Iterator["ServedModel"]:
        """Choose the version that runs the request, which is not closed while the context lasts: it has a pending request.

        The parameters may shorten the deadline. A request that would be answered too late is refused.
        """
        self.model = self.registry.choose(self.model_name, self.version, parameters)
        shorten_deadline(self.deadline, timeout_parameter(parameters))
        with self.model.admission.place(
            seconds_left(self.deadline),
            lambda: self.has_begun() or self.deadline.expired(),
            lambda: seconds_left(self.deadline),
        ):
            yield self.model

    def check_admission(self) -> None:
        """Refuse a request before its body is read or decoded, if every version that may run it would."""
        _check_admission(self.registry.named(self.model_name, self.version), seconds_left(self.deadline))


def _check_admission(models: Sequence["ServedModel"], seconds: float) -> None:
    """Refuse a request that has to be answered in so many seconds, if all of these versions refuse it."""
    if models and all(model.refuses(seconds) for model in models):
        models[-1].check_admission(seconds)
