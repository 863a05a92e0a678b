"""Runs the stages of one process on requests, one after another, and sends on what they return."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from stagepack.format.reader import Bundle
from stagepack_loaders.adapter_changes import with_listed_adapters
from stagepack_loaders.base import Runtime, SharedObjects
from stagepack_loaders.distributed.membership import Membership
from stagepack_loaders.distributed.packing import PackedValues, pack_command, pack_failure, pack_values
from stagepack_loaders.distributed.process_group import MessageHead, SentMessages
from stagepack_loaders.distributed.routes import ControlKind, ControlMessage, RequestLayout, Route, RouteLayout
from stagepack_loaders.distributed.staging import VersionDescription
from stagepack_loaders.distributed.status import StageCounts, VersionStaged, report_error
from stagepack_loaders.distributed.transfers import RouteSenders
from stagepack_loaders.executor import DEFAULT_CALL, CallOptions
from stagepack_loaders.local_versions import LocalVersions
from stagepack_loaders.spans import ConsecutiveSpans, SpanRecorder
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import UpdateSource

# A slow process holds up those before it: what gloo sent for the request so many before has arrived before another one is run, and of each
# link all messages with bodies but so many are taken. Messages without bodies are limited by the memory of the socket of a link.
_REQUESTS_SENT_AHEAD = 4


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """A request on its way through the stages of one process, with the values that the process has so far, by edge name."""

    message: ControlMessage  # its kind is `FAIL` when a stage has failed on the request
    layout: RequestLayout
    values: dict[str, Any] = field(default_factory=dict)
    options: CallOptions = DEFAULT_CALL  # at the front: its version lives as long as the request

    @property
    def has_failed(self) -> bool:
        """Whether a stage has failed on it."""
        return self.message.kind == ControlKind.FAIL


@dataclass(slots=True, eq=False)
class _OutgoingRoute:
    """A route that begins at the process."""

    route: Route
    copies_at_once: bool  # the head may change as soon as it is sent
    copies_values: bool  # before they are sent
    last_layout: RouteLayout | None = None  # of the last request
    last_head: MessageHead | None = None  # whose memory is used again if it may change

    def head(self, layout: RouteLayout) -> MessageHead:
        """Return memory for the head of a message."""
        if self.last_head is None or self.last_layout is not layout or not self.copies_at_once:
            self.last_layout, self.last_head = layout, MessageHead(layout.head_bytes)
        return self.last_head


@dataclass(slots=True, eq=False, kw_only=True)
class _ProcessStage:
    """A stage of the process, the routes that bring its outputs to other processes, and how often and how long it has run."""

    number: int
    outgoing: tuple[_OutgoingRoute, ...]
    runs: int = 0
    busy_seconds: float = 0.0


class StageWorker:
    """The stages of one process. One thread uses it; others may read `stage_counts` and `sequence_count`, and cancel requests."""

    def __init__(
        self,
        bundle: Bundle,
        membership: Membership,
        report_failure: Callable[[int, int, Exception], None],
        spans: SpanRecorder,
    ) -> None:
        self.spans = ConsecutiveSpans(spans)
        rank = membership.group.rank
        routes_of_stage = {
            stage_number: [
                route for route in membership.routes if (route.source_rank, route.source_stage) == (rank, stage_number)
            ]
            for stage_number in membership.stage_numbers
        }
        own_routes = list(chain.from_iterable(routes_of_stage.values()))
        self._senders = RouteSenders(membership.connections, own_routes)
        self._symbols = bundle.entry_point.symbols
        self._sent_messages = SentMessages()
        self._report_failure = report_failure
        self._sequence_states: dict[int, dict[int, Any]] = {}
        self._cancelled_numbers: set[int] = set()
        self._local = LocalVersions(bundle, membership.take_stages(), membership.options.load)
        # By number, those that calls run on, and those that are loaded.
        self._versions = {0: self._local.newest}
        self._stages = [
            _ProcessStage(
                number=number,
                outgoing=tuple(
                    self._outgoing_route(route, has_state=driver.has_state) for route in routes_of_stage[number]
                ),
            )
            for number, driver in self._local.newest.stages.items()
        ]
        self._last_stage = max(membership.stage_numbers, default=None)

    @property
    def stage_counts(self) -> tuple[StageCounts, ...]:
        """What the stages have done."""
        return tuple(
            StageCounts(stage=stage.number, runs=stage.runs, busy_seconds=stage.busy_seconds) for stage in self._stages
        )

    @property
    def sequence_count(self) -> int:
        """The number of sequences whose state is kept."""
        return len(self._sequence_states)

    @contextmanager
    def inference(self, *, for_autograd: bool = True) -> Iterator[None]:
        """Return the context in which the thread calls `run_request`."""
        with ExitStack() as contexts:
            for runtime in self._runtimes():
                contexts.enter_context(runtime.inference(for_autograd=for_autograd))
            yield

    def run_request(self, request: StageRequest) -> None:
        """Run the stages on a request, and send on their outputs."""
        for stage in self._stages:
            if request.message.number in self._cancelled_numbers and not request.has_failed:
                request.message = request.message.failed()  # the front knows why
            if not request.has_failed:
                try:
                    self._run_stage(stage, request)
                except Exception as error:  # noqa: BLE001 - a stage raises anything
                    self._fail(stage, request, error)
            for outgoing in stage.outgoing:
                self._send_values(stage, outgoing, request)
        self._sent_messages.finish(request.message.number - _REQUESTS_SENT_AHEAD)
        self._senders.limit_untaken(_REQUESTS_SENT_AHEAD)
        for number in list(self._cancelled_numbers):
            if number <= request.message.number:
                self._cancelled_numbers.discard(number)
        self.spans.end("wait", request.message.number, self._last_stage)

    def cancel(self, number: int) -> None:
        """Run no further stage on a request. May be called from any thread."""
        self._cancelled_numbers.add(number)

    def stage_version(self, description: VersionDescription) -> VersionStaged:
        """Load a version beside those that run, in the thread that calls; return what the front is told."""
        report = UpdateReport(version="", previous="")
        try:
            running = self._versions[description.base]
            if description.adapters is None:
                source = UpdateSource(bundle=description.open(running.bundle.stored), name=description.name)
                staged = self._local.stage(source, report, SharedObjects(), running)
            else:
                staged = self._local.adapted(with_listed_adapters(running.bundle, description.adapters), running)
            self._versions[description.number] = staged
        except Exception as error:  # noqa: BLE001 - the front gets any error
            return VersionStaged(version=description.number, error=report_error(error))
        return VersionStaged(version=description.number, fetch=report.fetch, verify=report.verify, stage=report.stage)

    def execute(self, command: ControlMessage) -> None:
        """Send on a command, and do what it says."""
        for stage in self._stages:
            for outgoing in stage.outgoing:
                self._send(outgoing.route, command, pack_command(self._symbols))
        if command.kind == ControlKind.END_SEQUENCE:
            self._sequence_states.pop(command.sequence, None)
        elif command.kind == ControlKind.RESET_STATE:
            for stage in self._stages:
                self._local.newest.stages[stage.number].reset_state()
        elif command.kind == ControlKind.SEED:
            for runtime in self._runtimes():
                runtime.seed(command.seed)
        elif command.kind == ControlKind.SWITCH_VERSION:
            self._local.switch(self._versions[command.version])
        elif command.kind == ControlKind.END_VERSION:
            self._versions.pop(command.version, None)
        elif command.kind == ControlKind.CLOSE:
            self._sent_messages.finish()
            self._senders.finish()

    def _outgoing_route(self, route: Route, *, has_state: bool) -> _OutgoingRoute:
        copies_at_once = self._senders.has_link(route)
        # The next request may write the buffers that outputs are views of, before these have arrived.
        return _OutgoingRoute(route, copies_at_once, has_state and not self._senders.copies_bodies(route))

    def _runtimes(self) -> list[Runtime]:
        return list(dict.fromkeys(driver.runtime for driver in self._local.newest.stages.values()))

    def _run_stage(self, stage: _ProcessStage, request: StageRequest) -> None:
        driver, number = self._versions[request.message.version].stages[stage.number], request.message.number
        inputs = driver.take_inputs(request.values)
        self.spans.end("transfer", number, driver.number)
        sequence = request.message.sequence
        states = self._sequence_states.setdefault(sequence, {}) if sequence and driver.has_state else None
        start = time.perf_counter()
        try:
            outputs = driver.run(inputs, states, waits=True)
        finally:
            self.spans.end("compute", number, driver.number)
        stage.busy_seconds += time.perf_counter() - start
        stage.runs += 1
        request.values.update(zip(driver.outputs, outputs, strict=True))

    def _send_values(self, stage: _ProcessStage, outgoing: _OutgoingRoute, request: StageRequest) -> None:
        """Send what a route brings: the outputs of a stage, or that the request has failed."""
        layout = request.layout.of_route[outgoing.route]
        packed_values = None
        if not request.has_failed:
            try:
                packed_values = pack_values(
                    layout, request.values, self._symbols, copies=outgoing.copies_values, head=outgoing.head(layout)
                )
            except Exception as error:  # noqa: BLE001 - a stage returns anything
                self._fail(stage, request, error)
        if packed_values is None:
            packed_values = pack_failure(layout)
        self._send(outgoing.route, request.message, packed_values)
        self.spans.end("transfer", request.message.number, stage.number, packed_values.byte_count)

    def _send(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> None:
        self._sent_messages.add(message.number, self._senders.send(route, message, packed_values))

    def _fail(self, stage: _ProcessStage, request: StageRequest, error: Exception) -> None:
        """Report the error of a stage. The request has failed, and the others go on."""
        request.message = request.message.failed()
        self._report_failure(request.message.number, stage.number, error)
