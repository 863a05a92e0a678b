"""A process that runs stages for the front, until the front closes or is gone."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.control import (
    CONTROL_TAG,
    ControlKind,
    ControlMessage,
    control_memory,
    decode_control,
)
from stagepack_loaders.distributed.error_report import report_error
from stagepack_loaders.distributed.membership import GroupOptions, Membership, join_group
from stagepack_loaders.distributed.process_group import ConnectionLostError
from stagepack_loaders.distributed.route_layout import RouteLayouts
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.stage_worker import StageRequest, StageWorker
from stagepack_loaders.distributed.status import RequestError, StatusSender

HEARTBEAT_SECONDS = 0.5
# The exit status of a process that has lost another one; the launcher starts it again.
LOST_STATUS = 75
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_text(exit_status: int) -> str:
    """How a process has ended, for messages."""
    return f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"


def run_stage_process(bundle: Bundle, store: Store, rank: int, size: int, options: GroupOptions) -> None:
    """Run the stages of this process until the front closes the pipeline.

    The process ends with the status `LOST_STATUS` if another one is lost: threads may wait for its data for ever.

    Args:
        bundle: the bundle.
        store: the store of the group.
        rank: the number of this process, at least 1.
        size: the number of processes.
        options: how the pipeline is distributed.

    Raises:
        GroupError: a process has not come in time, or does not fit to the others.
        StagepackError: a process could not load its stages.
    """
    try:
        membership = join_group(bundle, store, rank, size, options)
        with _ignored_stop_signals():
            _StageProcess(bundle, membership).serve()
    except ConnectionLostError:
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
    """The threads of a process of stages: this one takes messages of the front, one runs stages, one sends heartbeats."""

    def __init__(self, bundle: Bundle, membership: Membership) -> None:
        self._group = membership.group
        self._symbols = bundle.manifest.symbols
        self._statuses = StatusSender(membership.group)
        self._is_closed = threading.Event()
        self._worker = StageWorker(
            membership.group,
            bundle.manifest,
            membership.stages,
            membership.routes,
            RouteLayouts(),
            in_flight=membership.options.in_flight,
            report_failure=self._report_failure,
            report_loss=lambda _: os._exit(LOST_STATUS),
        )
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()

    def serve(self) -> None:
        """Do what the front says, until it closes the pipeline."""
        while (message := self._next_message()).kind != ControlKind.CLOSE:
            if message.kind == ControlKind.RUN:
                self._worker.begin(StageRequest(message=message))
            else:
                self._worker.command(message)
        self._worker.close()
        self._worker.finish_messages()
        self._is_closed.set()
        self._statuses.close()

    def _next_message(self) -> ControlMessage:
        memory = control_memory(self._symbols)
        self._group.receive(memory, FRONT_RANK, CONTROL_TAG).wait()
        return decode_control(memory, self._symbols)

    def _report_failure(self, request_number: int, stage_number: int, error: Exception) -> None:
        self._statuses.send(RequestError(request=request_number, stage=stage_number, error=report_error(error)))

    def _send_heartbeats(self) -> None:
        try:
            while not self._is_closed.wait(HEARTBEAT_SECONDS):
                self._statuses.send(self._worker.status())
        except ConnectionLostError:
            os._exit(LOST_STATUS)
