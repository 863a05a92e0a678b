"""A process that runs stages for the front, until the front closes or is gone.

A launcher starts it with ``python -m stagepack_loaders.distributed.stage_process DESCRIPTION``.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from stagepack.errors import StageLostError, StagepackError
from stagepack.format.reader import Bundle
from stagepack.named_adapters import with_adapters
from stagepack.opening import open_bundle, open_delta
from stagepack.partition.joined_bundle import join_bundle
from stagepack_loaders.distributed.group_trace import report_spans
from stagepack_loaders.distributed.launch_failures import LaunchFailures
from stagepack_loaders.distributed.meeting import Seat, tell_lost_connection, tell_start_error
from stagepack_loaders.distributed.membership import GroupOptions, Membership, join_group
from stagepack_loaders.distributed.process_group import MessageHead, open_store
from stagepack_loaders.distributed.routes import (
    ANNOUNCEMENT_TAG,
    CANCEL_TAG,
    FRONT_RANK,
    REQUEST_KINDS,
    ConnectionLostError,
    ControlKind,
    ControlMessage,
    RequestLayouts,
    control_bytes,
    read_control,
)
from stagepack_loaders.distributed.stage_worker import StageRequest, StageWorker
from stagepack_loaders.distributed.staging import read_description
from stagepack_loaders.distributed.status import ProcessStatus, RequestFailure, StatusSender, report_error, stages_text
from stagepack_loaders.distributed.transfers import RouteReceivers
from stagepack_loaders.distributed.watch import HEARTBEAT_SECONDS, LOST_STATUS, FrontWatch
from stagepack_loaders.logs import RequestTrace, current_trace, write_process_log
from stagepack_loaders.python_process import STOP_SIGNALS, kept_signal_handlers
from stagepack_loaders.spans import SpanRecorder

# The exit status of a process whose device computes nothing more.
DEVICE_LOST_STATUS = 76
_LOGGER = logging.getLogger("stagepack")
_FRONT_SILENCE_SECONDS = 10.0
_REQUESTS_POSTED_AHEAD = 3


class ProcessDescription(Struct, frozen=True, kw_only=True):
    """What a process is told when it is started.

    Attributes:
        bundle: the folder of the bundle, or its URL with its `digest`.
        deltas: the folders, or URLs, of the deltas that make the bundle that is loaded of it.
        delta_digests: the digests of these deltas.
        host: the address of the store of the group, which has the `port`.
        parent: the process that has started it on this machine, with which it ends; 0 if there is none.
    """

    bundle: str
    rank: int
    size: int
    host: str
    port: int
    options: GroupOptions
    digest: str | None = None
    deltas: tuple[str, ...] = ()
    delta_digests: tuple[str, ...] = ()
    parent: int = 0


def decode_description(content: str) -> ProcessDescription:
    """Return what `encode_description` has encoded."""
    return msgspec.convert(json.loads(content), ProcessDescription)


def encode_description(description: ProcessDescription) -> str:
    """Return a description as an argument of the program. Paths may have bytes that are not UTF-8, which only Python's json encodes."""
    return json.dumps(msgspec.to_builtins(description))


def run_process(description: ProcessDescription) -> None:
    """Run the stages of one process. The front reports errors of all processes; this one only ends."""
    write_process_log()
    if description.parent:
        end_with_parent(description.parent)
    try:
        store = open_store(description.host, description.port)
    except DistError:  # the front has gone
        sys.exit(LOST_STATUS)
    try:
        for module_name in description.options.processes.imports:
            importlib.import_module(module_name)
        digests = zip(description.deltas, description.delta_digests, strict=True)
        deltas = [open_delta(place, digest=digest) for place, digest in digests]
        bundle = open_bundle(description.bundle, digest=description.digest, deltas=deltas)
        if stage_counts := description.options.stage_counts:
            bundle = join_bundle(bundle, stage_counts)
        bundle = with_adapters(bundle, description.options.load.adapters)
    except Exception as error:  # noqa: BLE001 - an imported module raises anything
        tell_start_error(store, description.rank, error)
        sys.exit(LOST_STATUS)
    try:
        run_stage_process(bundle, Seat(store, description.rank, description.size), description.options)
    except (StagepackError, DistError):  # told by all processes, or the front has gone
        sys.exit(LOST_STATUS)
    except Exception as error:
        tell_start_error(store, description.rank, error)
        raise


def run_stage_process(
    bundle: Bundle,
    seat: Seat,
    options: GroupOptions,
    failures: LaunchFailures | None = None,
) -> None:
    """Run the stages of this process until the front closes the pipeline.

    The process, which is not the front, ends with the status `LOST_STATUS` if another one is lost.

    failures: of processes that a launcher has started on several machines; None where the front reports the errors of all.
    """
    try:
        if failures is None:
            membership = join_group(bundle, seat, options)
        else:
            with failures.watching():
                membership = join_group(bundle, seat, options, failures.check, raises_at_once=True)
            failures.hosts.update({member: identity.host for member, identity in enumerate(membership.identities)})
            _LOGGER.info("%s runs %s", failures.origin, stages_text(membership.stored_stages(seat.rank)))
        with _ignored_stop_signals():
            _StageProcess(bundle, membership, failures).serve()
    except ConnectionLostError as error:
        _end_after_loss(seat.store, seat.rank, error, failures)


def end_with_parent(process_id: int) -> None:
    """End this process when the one that has started it is gone, even if that was killed before this one has met the front."""

    def watch() -> None:
        while os.getppid() == process_id:
            time.sleep(HEARTBEAT_SECONDS)
        os._exit(LOST_STATUS)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _end_after_loss(store: Store, rank: int, error: ConnectionLostError, failures: LaunchFailures | None) -> None:
    """End this process because another one is lost, at once: threads may wait for its data for ever."""
    tell_lost_connection(store, rank, str(error))
    if failures is not None:
        failures.end_after_loss(str(error), _LOGGER.error)
    os._exit(LOST_STATUS)


def _end_after_silence(seconds: float, failures: LaunchFailures | None) -> None:
    """End this process because the front takes no heartbeats: nothing can be heard of it."""
    if failures is not None:
        failures.end_after_loss(f"it has taken no heartbeat for {seconds:.1f} s", _LOGGER.error, HEARTBEAT_SECONDS)
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
    with kept_signal_handlers():
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, signal.SIG_IGN)
        yield


class _StageProcess:
    """The threads of a process of stages: this one runs them, others post receives of bodies ahead and exchange heartbeats."""

    def __init__(self, bundle: Bundle, membership: Membership, failures: LaunchFailures | None) -> None:
        self._failures = failures
        self._store = membership.store
        self._group = membership.group
        self._symbols = bundle.entry_point.symbols
        self._statuses = StatusSender(membership.group)
        self._last_number = 0
        self._connections = membership.connections
        self._layouts = RequestLayouts(membership.routes, self._symbols, membership.local_routes)
        self._receivers = RouteReceivers(membership.connections, membership.routes, self._symbols)
        self._posting_places = threading.Semaphore(_REQUESTS_POSTED_AHEAD)
        self._spans = SpanRecorder(membership.group.rank)
        self._first_stage = min(membership.stage_numbers, default=None)
        self._worker = StageWorker(bundle, membership, self._report_failure, self._spans)
        self._threads = [
            threading.Thread(target=self._post_bodies, name="receives", daemon=True),
            threading.Thread(target=self._receive_cancellations, name="cancellations", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._watch = FrontWatch(
            self._statuses,
            self._make_status,
            report_loss=self._end_after_loss,
            report_silence=lambda seconds: _end_after_silence(seconds, failures),
            silence_seconds=_FRONT_SILENCE_SECONDS,
        )

    def serve(self) -> None:
        """Do what the front says, until it closes the pipeline."""
        with self._worker.inference(for_autograd=False):
            while (message := self._next_message()).kind != ControlKind.CLOSE:
                if message.kind in REQUEST_KINDS:
                    self._run(message)
                else:
                    self._worker.execute(message)
                    self._trace(message.kind)
            self._worker.execute(message)
        self._watch.is_closed.set()
        for thread in (
            *self._threads,
            *self._watch.threads,
        ):  # one that waits in gloo would abort the interpreter at its end
            thread.join()
        self._statuses.close()
        self._connections.close()

    def _next_message(self) -> ControlMessage:
        message = self._receivers.next_message()
        if message is None:  # no route ends at a process without stages
            for thread in self._threads:
                thread.join()
            return ControlMessage(kind=ControlKind.CLOSE, number=0)
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
        current_trace.set(RequestTrace.of_words(message.trace_words))
        start_time = time.perf_counter()
        self._worker.run_request(request)
        self._last_number = message.number
        if _LOGGER.isEnabledFor(logging.DEBUG):
            seconds = time.perf_counter() - start_time
            fields = {"rank": self._group.rank, "request": message.number, "seconds": round(seconds, 6)}
            _LOGGER.debug(
                "process %d: request %d took %.1f ms", *list(fields.values())[:2], 1e3 * seconds, extra=fields
            )

    def _trace(self, kind: ControlKind) -> None:
        """Begin to record spans, or send them to the front."""
        if kind == ControlKind.START_TRACE:
            self._spans.start()
        elif kind == ControlKind.STOP_TRACE:
            for report in report_spans(self._spans):
                self._statuses.send(report)

    def _post_bodies(self) -> None:
        """Post the receives of the bodies of requests, which the front announces."""
        try:
            for message in self._control_messages(ANNOUNCEMENT_TAG):
                layout = self._layouts.find(message.size_words)
                self._posting_places.acquire()
                self._receivers.post_bodies(layout)
        except ConnectionLostError as error:
            self._end_after_loss(error)
        except StagepackError:  # no size that the contract allows
            os._exit(LOST_STATUS)

    def _receive_cancellations(self) -> None:
        try:
            for message in self._control_messages(CANCEL_TAG):
                if message.kind == ControlKind.STAGE_VERSION:
                    threading.Thread(
                        target=self._stage_version, args=(message.version,), name="version", daemon=True
                    ).start()
                else:
                    self._worker.cancel(message.number)
        except ConnectionLostError as error:
            self._end_after_loss(error)

    def _stage_version(self, number: int) -> None:
        """Load a version, while the stages run, and tell the front."""
        with contextlib.suppress(ConnectionLostError, DistError):  # another thread finds that the front has gone
            self._statuses.send(self._worker.stage_version(read_description(self._store, number)))

    def _control_messages(self, tag: int) -> Iterator[ControlMessage]:
        """The messages that the front sends beside the routes, until it closes."""
        head = MessageHead(control_bytes(self._symbols))
        while True:
            self._group.receive(head.memory, FRONT_RANK, tag).wait()
            message = read_control(head.view, len(self._symbols))
            if message.kind == ControlKind.CLOSE:
                return
            yield message

    def _report_failure(self, request_number: int, stage_number: int, error: Exception) -> None:
        """Report the error of a stage; after that of a device that computes nothing more in this process, end it, to be started again."""
        if isinstance(error, StageLostError):
            _LOGGER.error("%s", error)
            os._exit(DEVICE_LOST_STATUS)
        fields = {"rank": self._group.rank, "request": request_number, "stage": stage_number}
        _LOGGER.info("process %d: request %d failed in stage %d: %s", *fields.values(), error, extra=fields)
        self._statuses.send(RequestFailure(request=request_number, stage=stage_number, error=report_error(error)))

    def _make_status(self) -> ProcessStatus:
        return ProcessStatus(
            stages=self._worker.stage_counts,
            sequences=self._worker.sequence_count,
            sent_bytes=self._group.sent_bytes,
            last_number=self._last_number,
        )

    def _end_after_loss(self, error: ConnectionLostError) -> None:
        _end_after_loss(self._store, self._group.rank, error, self._failures)


if __name__ == "__main__":
    run_process(decode_description(sys.argv[1]))
