"""A trace of all processes of a pipeline: each records its own spans, and sends them to the front at the end."""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future

from msgspec import Struct

from stagepack.errors import OptionError, StageLostError
from stagepack_loaders.distributed.routes import FRONT_RANK, ControlKind
from stagepack_loaders.spans import Span, SpanRecorder

# So that a status stays far below the largest one: a span has about 70 bytes.
_SPANS_PER_REPORT = 4000


class SpanReport(Struct, frozen=True, kw_only=True, tag="spans"):
    """Some spans of a process, and how many it has dropped."""

    spans: tuple[Span, ...]
    dropped: int
    is_last: bool  # of this trace


def report_spans(recorder: SpanRecorder) -> Iterator[SpanReport]:
    """Stop a recorder, and yield what it has recorded in reports; at least one."""
    spans = recorder.stop()
    starts = range(0, max(len(spans), 1), _SPANS_PER_REPORT)
    for start in starts:
        yield SpanReport(
            spans=tuple(spans[start : start + _SPANS_PER_REPORT]),
            dropped=recorder.dropped if start == starts[-1] else 0,
            is_last=start == starts[-1],
        )


class GroupTrace:
    """The trace of all processes, at the front. One is on at a time. Its methods may be called from any thread.

    `spans` records what the front does.
    """

    def __init__(self, ranks: Collection[int], send_command: Callable[[ControlKind], int]) -> None:
        self.spans = SpanRecorder(FRONT_RANK)
        self._ranks = ranks
        self._send_command = send_command
        self._lock = threading.Lock()
        self._is_on = False

    def start(self) -> None:
        """Have all processes record what they do for each request after this call."""
        with self._lock:
            if self._is_on:
                raise OptionError("the pipeline is traced already: end the other trace first")
            self._is_on = True
            self._missing_ranks = set(self._ranks)
            self._collected: list[Span] = []
            self._dropped = 0
            self._completed: Future[None] = Future()
        self.spans.start()
        try:
            self._first_request = self._send_command(ControlKind.START_TRACE) + 1
        except BaseException:
            self._end()
            raise

    def stop(self) -> tuple[list[Span], int]:
        """Wait for the requests before this call, and collect what all processes have recorded."""
        try:
            self._send_command(ControlKind.STOP_TRACE)
            self._completed.result()
        finally:
            self._end()
        spans = [span for span in self._collected if span.request >= self._first_request]
        return sorted(spans, key=lambda span: span.start), self._dropped

    def add(self, rank: int, report: SpanReport) -> None:
        """Take a report of a process."""
        with self._lock:
            if not self._is_on:
                return
            self._collected += report.spans
            self._dropped += report.dropped
            if report.is_last:
                self._missing_ranks.discard(rank)
            is_complete = not self._missing_ranks and not self._completed.done()
        if is_complete:
            self._completed.set_result(None)

    def add_own(self) -> None:
        """Take what the front has recorded, when it has answered the requests of the trace."""
        for report in report_spans(self.spans):
            self.add(FRONT_RANK, report)

    def fail(self, lost: StageLostError) -> None:
        """Give up, since a process is lost."""
        with self._lock:
            if self._is_on and not self._completed.done():
                self._completed.set_exception(lost)

    def _end(self) -> None:
        self.spans.stop()
        with self._lock:
            self._is_on = False
