"""The requests that the front has sent and not answered, with the errors of stages on them."""

import threading
import time
from concurrent.futures import Future
from typing import Any

from stagepack.errors import StageLostError, repeated_error

_REPORT_SECONDS = 5.0


class RequestsInFlight:
    """The requests that are not answered yet, by number. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._errors: dict[int, Future[Exception]] = {}
        self._last_progress = time.monotonic()

    def add(self, number: int, answer: "Future[dict[str, Any]]") -> None:
        """Add a request that is about to be sent."""
        with self._lock:
            if not self._answers:
                self._last_progress = time.monotonic()
            self._answers[number] = answer

    def remove(self, number: int) -> "Future[dict[str, Any]] | None":
        """Remove a request that is about to be answered; return its answer, or None if it has failed with all others."""
        with self._lock:
            self._errors.pop(number, None)
            self._last_progress = time.monotonic()
            return self._answers.pop(number, None)

    def add_error(self, number: int, error: Exception) -> None:
        """Add the error of a stage on a request; its first one counts."""
        with self._lock:
            if number in self._answers and not (report := self._errors.setdefault(number, Future())).done():
                report.set_result(error)

    def find_error(self, number: int, *, wait: bool) -> Exception | None:
        """Return the error of a stage on a request."""
        with self._lock:
            if not wait and number not in self._errors:
                return None
            report = self._errors.setdefault(number, Future())
        try:
            return report.result(_REPORT_SECONDS)
        except TimeoutError:
            return StageLostError("a stage failed on the request, and its process has not said why")

    def find_stalled(self, stall_seconds: float) -> tuple[int, float] | None:
        """Return the oldest request, and for how many seconds none was answered, if that is too long."""
        seconds = time.monotonic() - self._last_progress
        with self._lock:
            return (min(self._answers), seconds) if self._answers and seconds > stall_seconds else None

    def fail(self, lost: StageLostError) -> None:
        """Fail all requests."""
        with self._lock:
            answers, self._answers = list(self._answers.values()), {}
        for answer in answers:
            answer.set_exception(repeated_error(lost))  # its traceback has the values of the call
