"""What processes tell each other of themselves: that they live, what they have done, and who is gone; and the errors of requests.

Errors cross from one process to another by the name of their class, if it is one of stagepack's or of Python's own, and their message.
"""

import builtins
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from msgspec import Struct, structs

from stagepack import errors
from stagepack.errors import FormatError, Problem, StageLostError, StagepackError, repeated_error
from stagepack_loaders.distributed.group_trace import SpanReport
from stagepack_loaders.distributed.process_group import ProcessGroup, SentMessages, allocate
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError

# How long a process has to tell the error of a request that has failed.
_REPORT_SECONDS = 5.0
_STATUS_TAG = 2**20  # above all tags of routes
_LENGTH_BYTES = 8
_LARGEST_STATUS = 2**20  # bytes
_LONGEST_MESSAGE = 10_000  # characters
_MOST_LISTED = 4  # stages in a message


class ReportedProblem(Struct, frozen=True):
    """A `Problem` of a `FormatError`."""

    rule: str
    where: str
    message: str


class ErrorReport(Struct, frozen=True, kw_only=True):
    """An error, with the problems of a `FormatError`."""

    class_name: str
    message: str
    problems: tuple[ReportedProblem, ...] = ()


def report_error(error: Exception) -> ErrorReport:
    """Describe an error."""
    problems = error.problems if isinstance(error, FormatError) else ()
    return ErrorReport(
        class_name=type(error).__name__,
        message=str(error),
        problems=tuple(ReportedProblem(problem.rule, problem.where, problem.message) for problem in problems),
    )


def rebuild_error(report: ErrorReport) -> Exception:
    """Return an error of the class that was reported, or a `StagepackError` that names another class."""
    error_class = getattr(errors, report.class_name, None) or getattr(builtins, report.class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, FormatError):
        if report.problems:
            error = error_class(
                [
                    Problem(rule=problem.rule, where=problem.where, message=problem.message)
                    for problem in report.problems
                ]
            )
            error.args = (report.message,)  # which may begin with the bundle, and with the process
            return error
    elif isinstance(error_class, type) and issubclass(error_class, Exception):
        try:
            return error_class(report.message)
        except TypeError:  # of a class such as UnicodeDecodeError, which is not made from a message
            pass
    return StagepackError(f"{report.class_name}: {report.message}")


def attribute_error(error: StagepackError, origin: str) -> None:
    """Let an error begin with the name of its process, unless it has one."""
    if not error.origin:
        error.origin = origin
        if not str(error).startswith("process "):  # that is lost
            error.args = (f"{origin}: {error}", *error.args[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a process, as far as its launcher knows it; `reason` is such as ``"it ended with signal 9"``."""

    reason: str
    exit_status: int | None = None


def exit_text(exit_status: int) -> str:
    """How a process has ended, for messages."""
    return f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"


def stages_text(stages: Sequence[int]) -> str:
    """Return the numbers of consecutive stages for messages, such as ``"stage 1"``, ``"stages 2, 3"`` or ``"stages 0 to 11"``."""
    if len(stages) > _MOST_LISTED:
        return f"stages {stages[0]} to {stages[-1]}"
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


def lost_error(
    rank: int,
    end_text: str,
    *,
    host: str,
    stages: tuple[int, ...] = (),
    stored_stages: Sequence[int] = (),
    exit_status: int | None = None,
) -> StageLostError:
    """Return the error that names a process which is gone, with what it ran of the bundle. The host and the stages may be unknown."""
    on_host = f" on {host}" if host else ""
    runs = f", which runs {stages_text(stored_stages)}," if stored_stages else ""
    message = f"process {rank}{on_host}{runs} {end_text}"
    return StageLostError(message, stages=stages, host=host, exit_status=exit_status)


class StageCounts(Struct, frozen=True, kw_only=True):
    """What a stage has done since its process started."""

    stage: int
    runs: int
    busy_seconds: float


class ProcessStatus(Struct, frozen=True, kw_only=True, tag="status"):
    """A heartbeat of a process, with what it has done."""

    stages: tuple[StageCounts, ...] = ()
    last_number: int = 0  # of the requests that it has run
    pending_requests: int = 0  # which it has not run yet; the front knows it
    sequences: int = 0  # whose state it keeps
    sent_bytes: int = 0  # to other processes


class RequestFailure(Struct, frozen=True, kw_only=True, tag="error"):
    """A stage failed on a request, whose number is `request`."""

    request: int
    stage: int
    error: ErrorReport


class VersionStaged(Struct, frozen=True, kw_only=True, tag="staged"):
    """A process has loaded its stages of a version, in so many seconds, or could not."""

    version: int
    fetch: float = 0.0
    verify: float = 0.0
    stage: float = 0.0
    error: ErrorReport | None = None


class ProcessClosed(Struct, frozen=True, kw_only=True, tag="closed"):
    """The last status of a process, which has run all requests and ends; with the error that ends it, if it is one."""

    error: ErrorReport | None = None


class ProcessLost(Struct, frozen=True, kw_only=True, tag="lost"):
    """What the front tells the others of a process that is gone; `is_expected`: it has ended by itself, without an error."""

    message: str
    stages: tuple[int, ...]
    host: str
    is_expected: bool = False

    @classmethod
    def of(cls, lost: StageLostError, *, is_expected: bool = False) -> "ProcessLost":
        """Return the message about a loss."""
        return cls(message=str(lost), stages=lost.stages, host=lost.host, is_expected=is_expected)

    def rebuild(self) -> StageLostError:
        """Return the loss that it tells of."""
        return StageLostError(self.message, stages=self.stages, host=self.host)


# Statuses that the front keeps; the others are about the end of a process.
RecordedStatus = ProcessStatus | RequestFailure | SpanReport | VersionStaged
Status = RecordedStatus | ProcessClosed | ProcessLost

_DECODER = msgspec.json.Decoder(Status)


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


class StatusSender:
    """Sends statuses to another process, one at a time. Its methods may be called from any thread."""

    def __init__(self, group: ProcessGroup, target_rank: int = FRONT_RANK) -> None:
        self._group = group
        self._target_rank = target_rank
        self._sent_messages = SentMessages()
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, status: Status) -> None:
        """Send a status, after the other process has received the one before. After `close`, nothing is sent."""
        if isinstance(status, RequestFailure) and len(status.error.message) > _LONGEST_MESSAGE:
            message = status.error.message[:_LONGEST_MESSAGE]
            status = structs.replace(status, error=structs.replace(status.error, message=message, problems=()))
        content = msgspec.json.encode(status)
        length = torch.tensor([len(content)], dtype=torch.int64).view(torch.uint8)
        memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with self._lock:
            if not self._is_closed:
                self._sent_messages.finish()
                transfers = [self._group.send(part, self._target_rank, _STATUS_TAG) for part in (length, memory)]
                self._sent_messages.add(0, transfers)

    def close(self, error: ErrorReport | None = None) -> None:
        """Send the last status, and wait until the other process has received it."""
        self.send(ProcessClosed(error=error))
        with self._lock:
            self._is_closed = True
            self._sent_messages.finish()


def receive_status(group: ProcessGroup, source_rank: int) -> Status:
    """Wait for the next status of a process."""
    length_memory = allocate(_LENGTH_BYTES)
    group.receive(length_memory, source_rank, _STATUS_TAG).wait()
    length = int(length_memory.view(torch.int64).item())
    if not 0 < length <= _LARGEST_STATUS:
        raise ConnectionLostError(f"expected a status of at most {_LARGEST_STATUS} bytes, found {length}")
    content = allocate(length)
    group.receive(content, source_rank, _STATUS_TAG).wait()
    try:
        status: Status = _DECODER.decode(bytes(content.numpy()))
    except msgspec.DecodeError as error:
        raise ConnectionLostError(f"expected a status: {error}") from None
    return status
