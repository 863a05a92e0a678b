"""Runs the stages of one process on requests, one after another, and sends on what they return.

- A process that runs stages for the front, until the front closes or is gone.
"""

# Long because the process of stages and the worker in it end each other in every case of loss.

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch.distributed.distributed_c10d import Store

from stagepack.errors import StageLostError, StagepackError
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack_loaders.base import LoadedStage, Runtime, stage_state
from stagepack_loaders.distributed.error_report import report_error
from stagepack_loaders.distributed.group_trace import report_spans
from stagepack_loaders.distributed.membership import GroupOptions, Membership, join_group, tell_lost_connection
from stagepack_loaders.distributed.packing import MessageHead, PackedValues, pack_command, pack_failure, pack_values
from stagepack_loaders.distributed.process_group import SentMessages
from stagepack_loaders.distributed.routes import (
    ANNOUNCEMENT_TAG,
    FRONT_RANK,
    REQUEST_KINDS,
    ConnectionLostError,
    ControlKind,
    ControlMessage,
    RequestLayout,
    RequestLayouts,
    Route,
    RouteLayout,
    control_bytes,
    read_control,
)
from stagepack_loaders.distributed.status import ProcessStatus, RequestError, StageCounts, StatusSender
from stagepack_loaders.distributed.transfers import RouteReceivers, RouteSenders
from stagepack_loaders.exchange import to_runtime
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.run_trace import ConsecutiveSpans, SpanRecorder
from stagepack_loaders.stage_errors import typed_stage_errors

# A slow process holds up those before it: what gloo sent for the request so many before has arrived before another one is run, and of each
# link all messages with bodies but so many are taken. Messages without bodies are limited by the memory of the socket of a link.
_REQUESTS_SENT_AHEAD = 4
HEARTBEAT_SECONDS = 0.5
# The exit status of a process that has lost another one; the launcher starts it again.
LOST_STATUS = 75
# Of a process whose device computes nothing more.
DEVICE_LOST_STATUS = 76
_LOGGER = logging.getLogger("stagepack")
_FRONT_SILENCE_SECONDS = 10.0
_REQUESTS_POSTED_AHEAD = 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """A request on its way through the stages of one process.

    Attributes:
        message: its number, sequence and sizes. Its kind is `FAIL` when a stage has failed on it.
        layout: how its values travel.
        values: the values that the process has so far, by edge name.
        copies_results: at the front, whether results are copied out of memory that is shared with other processes.
    """

    message: ControlMessage
    layout: RequestLayout
    values: dict[str, Any] = field(default_factory=dict)
    copies_results: bool = True

    @property
    def has_failed(self) -> bool:
        """Whether a stage has failed on it."""
        return self.message.kind == ControlKind.FAIL


@dataclass(slots=True, eq=False)
class _OutgoingRoute:
    """A route that begins at the process.

    Attributes:
        route: the route.
        copies_at_once: whether what is sent on it may change as soon as it is sent.
        copies_values: whether values are copied before they are sent.
        last_layout: how the values of the last request travelled.
        last_head: the head of its message, whose memory is used again if it may change.
    """

    route: Route
    copies_at_once: bool
    copies_values: bool
    last_layout: RouteLayout | None = None
    last_head: MessageHead | None = None

    def head(self, layout: RouteLayout) -> MessageHead:
        """Return memory for the head of a message."""
        if self.last_head is None or self.last_layout is not layout or not self.copies_at_once:
            self.last_layout, self.last_head = layout, MessageHead(layout.head_bytes)
        return self.last_head


@dataclass(slots=True, eq=False, kw_only=True)
class _ProcessStage:
    """A stage of the process, with what each request needs of it.

    Attributes:
        number: its number.
        loaded: the loaded stage.
        runtime: what runs it.
        inputs: its inputs.
        outputs: the names of its outputs.
        has_state: whether it has buffers that calls write.
        outgoing: the routes that bring its outputs to other processes.
        runs: how often it has run.
        busy_seconds: how long.
    """

    number: int
    loaded: LoadedStage
    runtime: Runtime
    inputs: tuple[Edge, ...]
    outputs: tuple[str, ...]
    has_state: bool
    outgoing: tuple[_OutgoingRoute, ...]
    runs: int = 0
    busy_seconds: float = 0.0


class StageWorker:
    """The stages of one process. One thread uses it; `stage_counts` and `sequence_count` may be read from others.

    Attributes:
        spans: records what this thread does.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
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
            for stage_number in membership.stages
        }
        self._senders = RouteSenders(membership.group, membership.links, chain.from_iterable(routes_of_stage.values()))
        self._symbols = entry_point.symbols
        self._sent_messages = SentMessages()
        self._report_failure = report_failure
        self._sequence_states: dict[int, dict[int, Any]] = {}
        edges = {edge.name: edge for edge in entry_point.edges}
        self._stages = []
        for number, loaded in membership.stages.items():
            entry = entry_point.stages[number]
            self._stages.append(
                _ProcessStage(
                    number=number,
                    loaded=loaded,
                    runtime=find_runtime(loaded.runtime),
                    inputs=tuple(edges[name] for name in entry.inputs),
                    outputs=tuple(entry.outputs),
                    has_state=bool(entry.state),
                    outgoing=tuple(
                        self._outgoing_route(route, has_state=bool(entry.state)) for route in routes_of_stage[number]
                    ),
                )
            )
        self._last_stage = max(membership.stages, default=None)

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
    def inference(self) -> Iterator[None]:
        """Return the context in which the thread calls `run_request`."""
        with ExitStack() as contexts:
            for runtime in self._runtimes():
                contexts.enter_context(runtime.inference())
            yield

    def run_request(self, request: StageRequest) -> None:
        """Run the stages on a request, and send on their outputs."""
        for stage in self._stages:
            if not request.has_failed:
                try:
                    self._run_stage(stage, request)
                except Exception as error:  # noqa: BLE001 - a stage raises anything
                    self._fail(stage, request, error)
            for outgoing in stage.outgoing:
                self._send_values(stage, outgoing, request)
        self._sent_messages.finish(request.message.number - _REQUESTS_SENT_AHEAD)
        self._senders.limit_untaken(_REQUESTS_SENT_AHEAD)
        self.spans.end("wait", request.message.number, self._last_stage)

    def execute(self, command: ControlMessage) -> None:
        """Send on a command, and do what it says."""
        for stage in self._stages:
            for outgoing in stage.outgoing:
                self._send(outgoing.route, command, pack_command(self._symbols))
        if command.kind == ControlKind.END_SEQUENCE:
            self._sequence_states.pop(command.sequence, None)
        elif command.kind == ControlKind.RESET_STATE:
            for stage in self._stages:
                stage.loaded.reset_state()
        elif command.kind == ControlKind.SEED:
            for runtime in self._runtimes():
                runtime.seed(command.seed)
        elif command.kind == ControlKind.CLOSE:
            self._sent_messages.finish()
            self._senders.finish()

    def _outgoing_route(self, route: Route, *, has_state: bool) -> _OutgoingRoute:
        copies_at_once = self._senders.has_link(route)
        # The next request may write the buffers that outputs are views of, before these have arrived.
        return _OutgoingRoute(route, copies_at_once, copies_values=has_state and not copies_at_once)

    def _runtimes(self) -> list[Runtime]:
        return list(dict.fromkeys(stage.runtime for stage in self._stages))

    def _run_stage(self, stage: _ProcessStage, request: StageRequest) -> None:
        values, runtime = request.values, stage.runtime
        inputs = []
        for edge in stage.inputs:
            values[edge.name] = value = to_runtime(values[edge.name], edge, runtime)
            inputs.append(value)
        self.spans.end("transfer", request.message.number, stage.number)
        start = time.perf_counter()
        try:
            with typed_stage_errors(stage.number):
                outputs = self._run_in_sequence(stage, inputs, request.message.sequence)
                runtime.wait(stage.loaded.device)
        finally:
            self.spans.end("compute", request.message.number, stage.number)
        stage.busy_seconds += time.perf_counter() - start
        stage.runs += 1
        values.update(zip(stage.outputs, outputs, strict=True))

    def _run_in_sequence(self, stage: _ProcessStage, inputs: list[Any], sequence: int) -> tuple[Any, ...]:
        """Run a stage with the state of a sequence."""
        if not sequence or not stage.has_state:
            return stage.loaded.run(inputs)
        with stage_state(stage.loaded, stage.number, self._sequence_states.setdefault(sequence, {})):
            return stage.loaded.run(inputs)

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


def run_stage_process(bundle: Bundle, store: Store, rank: int, size: int, options: GroupOptions) -> None:
    """Run the stages of this process until the front closes the pipeline.

    The process ends with the status `LOST_STATUS` if another one is lost.

    rank: the number of this process, at least 1.
    """
    try:
        membership = join_group(bundle, store, rank, size, options)
        with _ignored_stop_signals():
            _StageProcess(bundle, membership).serve()
    except ConnectionLostError as error:
        _end_after_loss(store, rank, error)


def end_with_parent(process_id: int) -> None:
    """End this process when the one that has started it is gone, even if that was killed before this one has met the front."""

    def watch() -> None:
        while os.getppid() == process_id:
            time.sleep(HEARTBEAT_SECONDS)
        os._exit(LOST_STATUS)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _end_after_loss(store: Store, rank: int, error: ConnectionLostError) -> None:
    """End this process because another one is lost, at once: threads may wait for its data for ever."""
    tell_lost_connection(store, rank, str(error))
    os._exit(LOST_STATUS)


@contextlib.contextmanager
def _ignored_stop_signals() -> Iterator[None]:
    """Leave it to the front when to end.

    Launchers and terminals signal all processes at once, and the front may have to answer requests first. If it does not, its connections
    end. Only the main thread can ignore signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal_number: signal.signal(signal_number, signal.SIG_IGN) for signal_number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)


class _StageProcess:
    """The threads of a process of stages: this one runs them, others post receives of bodies ahead and exchange heartbeats."""

    def __init__(self, bundle: Bundle, membership: Membership) -> None:
        self._store = membership.store
        self._group = membership.group
        self._symbols = bundle.entry_point.symbols
        self._statuses = StatusSender(membership.group)
        self._is_closed = threading.Event()
        self._last_number = 0
        self._links = membership.links
        self._layouts = RequestLayouts(membership.routes, self._symbols, membership.local_routes)
        self._receivers = RouteReceivers(membership.group, membership.links, membership.routes, self._symbols)
        self._posting_places = threading.Semaphore(_REQUESTS_POSTED_AHEAD)
        self._spans = SpanRecorder(membership.group.rank)
        self._first_stage = min(membership.stages, default=None)
        self._worker = StageWorker(bundle.entry_point, membership, self._report_failure, self._spans)
        self._threads = [
            threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True),
            threading.Thread(target=self._post_bodies, name="receives", daemon=True),
            threading.Thread(target=self._watch_front, name="silence", daemon=True),
        ]
        self._last_heartbeat = time.monotonic()
        for thread in self._threads:
            thread.start()

    def serve(self) -> None:
        """Do what the front says, until it closes the pipeline."""
        with self._worker.inference():
            while (message := self._next_message()).kind != ControlKind.CLOSE:
                if message.kind in REQUEST_KINDS:
                    self._run(message)
                else:
                    self._worker.execute(message)
                    self._trace(message.kind)
            self._worker.execute(message)
        self._is_closed.set()
        for thread in self._threads:  # one that waits in gloo would abort the interpreter at its end
            thread.join()
        self._statuses.close()
        self._links.close()

    def _next_message(self) -> ControlMessage:
        message = self._receivers.next_message()
        if message is None:
            raise ConnectionLostError("no route ends at this process")
        if message.kind in REQUEST_KINDS:
            self._worker.spans.end("wait", message.number, self._first_stage)
        return message

    def _run(self, message: ControlMessage) -> None:
        layout = self._layouts.find(message.size_words)
        values = self._receivers.values(layout)
        self._worker.spans.end("transfer", message.number, self._first_stage)
        request = StageRequest(message=message, layout=layout, values=values)
        if self._group.rank in layout.body_ranks:
            self._posting_places.release()
        self._worker.run_request(request)
        self._last_number = message.number

    def _trace(self, kind: ControlKind) -> None:
        """Begin to record spans, or send them to the front."""
        if kind == ControlKind.START_TRACE:
            self._spans.start()
        elif kind == ControlKind.STOP_TRACE:
            for report in report_spans(self._spans):
                self._statuses.send(report)

    def _post_bodies(self) -> None:
        """Post the receives of the bodies of requests, which the front announces."""
        head = MessageHead(control_bytes(self._symbols))
        try:
            while True:
                self._group.receive(head.memory, FRONT_RANK, ANNOUNCEMENT_TAG).wait()
                message = read_control(head.view, len(self._symbols))
                if message.kind == ControlKind.CLOSE:
                    return
                layout = self._layouts.find(message.size_words)
                self._posting_places.acquire()
                self._receivers.post_bodies(layout)
        except ConnectionLostError as error:
            _end_after_loss(self._store, self._group.rank, error)
        except StagepackError:  # no size that the contract allows
            os._exit(LOST_STATUS)

    def _report_failure(self, request_number: int, stage_number: int, error: Exception) -> None:
        """Report the error of a stage; after that of a device that computes nothing more in this process, end it, to be started again."""
        if isinstance(error, StageLostError):
            _LOGGER.error("%s", error)
            os._exit(DEVICE_LOST_STATUS)
        self._statuses.send(RequestError(request=request_number, stage=stage_number, error=report_error(error)))

    def _send_heartbeats(self) -> None:
        try:
            while not self._is_closed.wait(HEARTBEAT_SECONDS):
                self._statuses.send(
                    ProcessStatus(
                        stages=self._worker.stage_counts,
                        sequences=self._worker.sequence_count,
                        sent_bytes=self._group.sent_bytes,
                        last_number=self._last_number,
                    )
                )
                self._last_heartbeat = time.monotonic()
        except ConnectionLostError as error:
            _end_after_loss(self._store, self._group.rank, error)

    def _watch_front(self) -> None:
        """End this process when the front takes no heartbeats: its host may be gone without a word."""
        last_look = time.monotonic()
        while not self._is_closed.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            if now - last_look > _FRONT_SILENCE_SECONDS / 2:  # this process itself was stopped
                self._last_heartbeat = now
            last_look = now
            if now - self._last_heartbeat > _FRONT_SILENCE_SECONDS:
                os._exit(LOST_STATUS)
