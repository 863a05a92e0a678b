"""The process that is called: it sends requests to the processes of the stages, keeps those under way, and collects the results."""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from msgspec import structs

from stagepack.errors import ClosedError, InputError, OptionError, StageLostError, repeated_error
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.group_trace import GroupTrace, SpanReport
from stagepack_loaders.distributed.meeting import StageFacts
from stagepack_loaders.distributed.membership import Membership
from stagepack_loaders.distributed.packing import PackedValues, pack_command, pack_values, write_back_input
from stagepack_loaders.distributed.process_group import SentMessages
from stagepack_loaders.distributed.routes import (
    ANNOUNCEMENT_TAG,
    CANCEL_TAG,
    FRONT_RANK,
    ConnectionLostError,
    ControlKind,
    ControlMessage,
    RequestLayouts,
    encode_sizes,
    write_control,
)
from stagepack_loaders.distributed.stage_worker import StageRequest, StageWorker
from stagepack_loaders.distributed.staging import GroupStaging
from stagepack_loaders.distributed.status import (
    ProcessEnd,
    ProcessStatus,
    RecordedStatus,
    RequestFailure,
    RequestsInFlight,
    VersionStaged,
    rebuild_error,
)
from stagepack_loaders.distributed.transfers import QueuedSenders, RouteReceivers, RouteSenders
from stagepack_loaders.distributed.watch import GroupWatch, WatchEvents
from stagepack_loaders.executor import DEFAULT_CALL, CallOptions
from stagepack_loaders.logs import current_trace
from stagepack_loaders.spans import trace_clock

_CLOSE_SECONDS = 0.01
# How long threads get to end after their connections were closed; one may still run a stage.
_ABORT_SECONDS = 1.0


class FrontProcess:
    """The front of one group of processes. When one of these is lost, it answers nothing more; a new group needs a new front.

    Attributes:
        bundle: the bundle in the stages that the processes run.
        trace: records what all processes do, while it is on.
        staging: has all processes load a version.
        after_answer: called in the thread that answers, after each answer.
    """

    after_answer: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        bundle: Bundle,
        membership: Membership,
        *,
        find_end: Callable[[int], ProcessEnd | None] | None = None,
        report_loss: Callable[[StageLostError], None] = lambda _: None,
    ) -> None:
        self.bundle = bundle
        self._membership = membership
        self._group = membership.group
        self._report_loss = report_loss
        in_flight = membership.options.processes.in_flight
        self._places = threading.BoundedSemaphore(in_flight)  # further requests wait
        self._sent_messages = SentMessages()
        # Held while a message is sent, so that all processes get the messages in one order. The last reference to the pipeline may go in
        # the thread that has it, which then calls `close`.
        self._send_lock = threading.RLock()
        # Held while a cancellation is sent: none is after the message that closes.
        self._cancel_lock = threading.Lock()
        self._last_number = 0
        self._requests = RequestsInFlight()
        self._finished_here: SimpleQueue[StageRequest | ControlMessage] = SimpleQueue()
        # Without stages here, all work is finished here at once.
        self._work: SimpleQueue[StageRequest | ControlMessage] = (
            SimpleQueue() if membership.stage_numbers else self._finished_here
        )
        self._statuses: dict[int, ProcessStatus] = {}
        self._is_closed = False
        self._symbols = bundle.entry_point.symbols
        self._input_routes = [route for route in membership.routes if route.source_stage is None]
        self._layouts = RequestLayouts(membership.routes, self._symbols, membership.local_routes)
        self._senders = QueuedSenders(RouteSenders(membership.connections, self._input_routes))
        self._receivers = RouteReceivers(membership.connections, membership.routes, self._symbols)
        self.trace = GroupTrace(range(self._group.size), self.command)
        self._worker = StageWorker(bundle, membership, self._record_failure, self.trace.spans)
        self.staging = GroupStaging(
            membership,
            lambda version: self._tell_others(ControlKind.STAGE_VERSION, self._last_number, version),
            self._worker.stage_version if membership.stage_numbers else None,
        )
        self._threads = [
            *(
                [threading.Thread(target=self._run_stages, name="stages", daemon=True)]
                if membership.stage_numbers
                else []
            ),
            threading.Thread(target=self._send_queued, name="sends", daemon=True),
            threading.Thread(target=self._collect_results, name="results", daemon=True),
        ]
        events = WatchEvents(
            report_loss=self._fail_all,
            record_status=self._record_status,
            find_end=find_end,
            find_stalled=self._find_stalled,
        )
        self._watch = GroupWatch(membership, events)
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> StageLostError | None:
        """Why no request can be answered any more; None while all processes live."""
        return self._watch.lost or (ClosedError("the pipeline is closed") if self._is_closed else None)

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """What the processes have loaded, in the order of the stages."""
        return self._membership.stage_facts

    @property
    def process_names(self) -> dict[int, str]:
        """The rank, host and stages of each process for people, by rank."""
        return self._membership.process_names

    def submit(
        self,
        values: Mapping[str, Any],
        sizes: Mapping[str, int],
        sequence: int = 0,
        options: CallOptions = DEFAULT_CALL,
    ) -> "Future[dict[str, Any]]":
        """Send a request on its way. Waits while as many as allowed are in flight.

        values: the inputs of the model by edge name, known to fit. They must not be written before the answer.
        """
        start = trace_clock()
        size_words = encode_sizes(sizes, self._symbols)
        layout = self._layouts.find(size_words)
        # Before anything is sent: what cannot be packed fails this request alone.
        packed_inputs = [
            pack_values(layout.of_route[route], values, self._symbols, copies=False) for route in self._input_routes
        ]
        packed = trace_clock()
        if not self._places.acquire(blocking=False):
            self.refuse_waiting()
            self._places.acquire()
        try:
            options.check()
        except CancelledError:
            self._places.release()
            raise
        admitted = trace_clock()
        answer: Future[dict[str, Any]] = Future()
        answer.add_done_callback(lambda _: self._places.release())
        with self._sending():
            version = 0 if options.version is None else options.version.number
            message = self._next_message(ControlKind.RUN, sequence=sequence, version=version, size_words=size_words)
            self._requests.add(message.number, answer)
            if (lost := self.lost) is not None:  # those that are added later are not failed with the others
                if self._requests.remove(message.number) is not None:
                    answer.set_exception(repeated_error(lost))
                return answer
            request = StageRequest(message=message, layout=layout, values=dict(values), options=options)
            self._send(request, packed_inputs)
        if options.cancellation is not None:
            options.cancellation.add_done_callback(lambda _: self._cancel(message.number))
        self.trace.spans.add("transfer", message.number, start, end=packed)
        self.trace.spans.add("wait", message.number, packed, end=admitted)
        byte_count = sum(values.byte_count for values in packed_inputs) if self.trace.spans.is_on else 0
        self.trace.spans.add("transfer", message.number, admitted, byte_count=byte_count)
        return answer

    def command(self, kind: ControlKind, **fields: int) -> int:
        """Have all processes execute a command after the requests before it; `fields` are those of its message."""
        with self._sending():
            if (lost := self.lost) is not None:
                raise repeated_error(lost)
            message = self._next_message(kind, **fields)
            self._send_command(message)
        return message.number

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what each process has told last, by rank."""
        own_status = ProcessStatus(
            stages=self._worker.stage_counts, sequences=self._worker.sequence_count, sent_bytes=self._group.sent_bytes
        )
        return dict(self._statuses) | {FRONT_RANK: own_status}

    def close(self, seconds: float = math.inf) -> bool:
        """Answer what is in flight, and end the other processes. Nothing is sent any more.

        seconds: how long to wait for the answers.
        The result is whether all of them have ended in order; False if one is lost, or has not ended in time.
        """
        deadline = time.monotonic() + seconds
        with self._sending():
            if self._is_closed:
                return False
            with self._cancel_lock:
                self._is_closed = True
            self.staging.fail(ClosedError("the pipeline is closed"))
            if self._watch.lost is None:
                self._watch.expect_close()
                self._send_command(self._next_message(ControlKind.CLOSE))
                self._senders.end()
        return self._wait_for_end(deadline)

    def abort(self, reason: str) -> None:
        """End all connections. All requests fail."""
        self._watch.lose(ClosedError(reason))

    def join_threads(self) -> None:
        """Wait until the threads have ended, after the processes have, and close the connections.

        A thread that waits in gloo would abort the interpreter at its end.
        """
        threads = self._threads + self._watch.threads
        for thread in set(threads) - {threading.current_thread()}:
            thread.join(_ABORT_SECONDS)
        if not any(thread.is_alive() for thread in threads):
            with self._send_lock:  # a caller may still copy inputs into shared memory
                self._membership.close()

    def refuse_waiting(self) -> None:
        """Refuse to wait for an answer in the thread that answers."""
        if threading.current_thread() in self._threads:
            raise OptionError(
                "a callback of a call runs in the thread that answers calls, and cannot wait for another call, nor close the pipeline: "
                "do that in another thread"
            )

    def _wait_for_end(self, deadline: float) -> bool:
        """Wait until all calls are answered and all other processes have closed; return False if that was not in time, or one is lost."""
        with self._watch.reported_loss():
            while self._watch.lost is None and any(thread.is_alive() for thread in self._threads + self._watch.threads):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_CLOSE_SECONDS)
            if self._watch.lost is None:
                self._sent_messages.finish()
                self._senders.finish()
        return self._watch.lost is None

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Keep the order of messages. If a process has gone, that is told afterwards: callbacks that run then may call this front."""
        try:
            with self._send_lock:
                yield
        except ConnectionLostError as error:
            self._watch.lose_unknown(error)

    def _next_message(self, kind: ControlKind, **fields: Any) -> ControlMessage:
        self._last_number += 1
        trace = current_trace.get()
        trace_words = b"" if trace is None else trace.words()
        return ControlMessage(kind=kind, number=self._last_number, trace_words=trace_words, **fields)

    def _send_command(self, message: ControlMessage) -> None:
        self._send(message, [pack_command(self._symbols) for _ in self._input_routes])

    def _send(self, work: StageRequest | ControlMessage, packed_inputs: Sequence[PackedValues]) -> None:
        """Send a request or command on its way."""
        message = work.message if isinstance(work, StageRequest) else work
        if isinstance(work, StageRequest):
            self._announce(message, work.layout.body_ranks, ANNOUNCEMENT_TAG)
            self._receivers.post_bodies(work.layout)
        elif work.kind == ControlKind.CLOSE:
            self._announce(message, range(self._group.size), ANNOUNCEMENT_TAG)
            self._announce(message, range(self._group.size), CANCEL_TAG)
        for route, packed_values in zip(self._input_routes, packed_inputs, strict=True):
            self._sent_messages.add(message.number, self._senders.send(route, message, packed_values))
        self._work.put(work)

    def _announce(self, message: ControlMessage, ranks: Collection[int], tag: int) -> None:
        """Tell processes of a message before their routes do, or beside them."""
        head = pack_command(self._symbols).head
        write_control(head.view, message)
        transfers = [self._group.send(head.memory, rank, tag) for rank in ranks if rank != FRONT_RANK]
        self._sent_messages.add(message.number, transfers)

    def _cancel(self, number: int) -> None:
        """Tell all processes that nobody waits for the answer to a request: it fails before its next stage."""
        self._requests.add_error(number, CancelledError())
        if self._membership.stage_numbers:
            self._worker.cancel(number)
        self._tell_others(ControlKind.CANCEL, number)

    def _tell_others(self, kind: ControlKind, number: int, version: int = 0) -> None:
        """Tell the other processes something beside the routes."""
        with suppress(ConnectionLostError), self._cancel_lock:  # the watch finds out
            if not self._is_closed:
                message = ControlMessage(kind=kind, number=number, version=version)
                self._announce(message, range(self._group.size), CANCEL_TAG)

    def _send_queued(self) -> None:
        with self._watch.reported_loss():
            self._senders.run()

    def _run_stages(self) -> None:
        with self._watch.reported_loss(), self._worker.inference():
            while True:
                work = self._work.get()
                if isinstance(work, StageRequest):
                    self._worker.spans.begin()
                    self._worker.run_request(work)
                else:
                    self._worker.execute(work)
                self._finished_here.put(work)
                if not isinstance(work, StageRequest) and work.kind == ControlKind.CLOSE:
                    return
                del work  # its values are not kept until the next one comes

    def _collect_results(self) -> None:
        """Answer requests in their order, when the stages here have run and the results of the others have come."""
        with self._watch.reported_loss():
            while True:
                work = self._finished_here.get()
                start = trace_clock()
                message = self._receivers.next_message()
                if isinstance(work, StageRequest):
                    self.trace.spans.add("wait", work.message.number, start)
                    self._answer(work, message)
                elif work.kind == ControlKind.STOP_TRACE:
                    self.trace.add_own()
                elif work.kind == ControlKind.CLOSE:
                    return
                del work
                self.after_answer()

    def _answer(self, request: StageRequest, message: ControlMessage | None) -> None:
        number = request.message.number
        start = trace_clock()
        received_values = self._receivers.values(request.layout, copies=request.options.copies_results)
        self._sent_messages.finish(number)
        self.trace.spans.add("transfer", number, start)
        has_failed = ControlKind.FAIL in (request.message.kind, message.kind if message else None)
        error = self._requests.find_error(number, wait=has_failed)
        answer = self._requests.remove(number)
        if answer is None:
            return  # a process was lost meanwhile
        if error is not None:
            answer.set_exception(error)
            return
        try:
            for edge in self.bundle.edges:
                if edge.producer is None and edge.name in received_values:
                    write_back_input(request.values[edge.name], received_values.pop(edge.name), edge)
        except Exception as write_error:  # noqa: BLE001 - an input that the model writes cannot be written
            answer.set_exception(InputError(f"the model writes into an input: {write_error}"))
        else:
            answer.set_result(request.values | received_values)

    def _record_failure(self, number: int, stage_number: int, error: Exception) -> None:
        facts = self.stage_facts[stage_number]
        error.add_note(f"stage {stage_number} runs in process {facts.rank} on {facts.host}")
        self._requests.add_error(number, error)

    def _record_status(self, rank: int, status: RecordedStatus) -> None:
        if isinstance(status, RequestFailure):
            self._record_failure(status.request, status.stage, rebuild_error(status.error))
        elif isinstance(status, SpanReport):
            self.trace.add(rank, status)
        elif isinstance(status, VersionStaged):
            self.staging.add(rank, status)
        else:
            self._statuses[rank] = structs.replace(status, pending_requests=self._last_number - status.last_number)

    def _find_stalled(self) -> tuple[int, float] | None:
        stall_seconds = self._membership.options.stall_seconds
        return None if stall_seconds is None else self._requests.find_stalled(stall_seconds)

    def _fail_all(self, lost: StageLostError) -> None:
        """Fail all requests, since a process is lost."""
        self._membership.abort()  # before callbacks run
        self._senders.end()
        self._requests.fail(lost)
        self.trace.fail(repeated_error(lost))
        self.staging.fail(lost)
        for queue in (self._work, self._finished_here):  # whose threads wait for work, not for another process
            queue.put(ControlMessage(kind=ControlKind.CLOSE, number=0))
        self._report_loss(lost)
