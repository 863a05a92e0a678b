"""A process that runs stages for the front, until the front closes or is gone."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

from stagepack.errors import StageLostError, StagepackError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.control import (
    ANNOUNCEMENT_TAG,
    REQUEST_KINDS,
    ControlKind,
    ControlMessage,
    control_bytes,
    read_control,
)
from stagepack_loaders.distributed.error_report import report_error
from stagepack_loaders.distributed.group_trace import report_spans
from stagepack_loaders.distributed.handshake import tell_lost_connection
from stagepack_loaders.distributed.membership import GroupOptions, Membership, join_group
from stagepack_loaders.distributed.message_head import MessageHead
from stagepack_loaders.distributed.process_group import ConnectionLostError
from stagepack_loaders.distributed.route_layout import RequestLayouts
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.stage_worker import StageRequest, StageWorker
from stagepack_loaders.distributed.status import ProcessStatus, RequestError, StatusSender
from stagepack_loaders.distributed.transfers import RouteReceivers
from stagepack_loaders.run_trace import SpanRecorder

HEARTBEAT_SECONDS = 0.5
# The exit status of a process that has lost another one; the launcher starts it again.
LOST_STATUS = 75
# Of a process whose device computes nothing more.
DEVICE_LOST_STATUS = 76
_LOGGER = logging.getLogger("stagepack")
_FRONT_SILENCE_SECONDS = 10.0
_REQUESTS_POSTED_AHEAD = 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
