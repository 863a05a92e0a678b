"""What the processes of the stages tell the front: that they live, what they have done, errors, and spans of a trace."""

import threading

import msgspec
import torch
from msgspec import Struct, structs

from stagepack_loaders.distributed.error_report import ErrorReport
from stagepack_loaders.distributed.group_trace import SpanReport
from stagepack_loaders.distributed.process_group import ConnectionLostError, ProcessGroup, SentMessages
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.tensor_memory import allocate

_STATUS_TAG = 2**20  # above all tags of routes
_LENGTH_BYTES = 8
_LARGEST_STATUS = 2**20  # bytes
_LONGEST_MESSAGE = 10_000  # characters


class StageCounts(Struct, frozen=True, kw_only=True):
    """What a stage has done since its process started.

    Attributes:
        stage: its number.
        runs: how often it ran.
        busy_seconds: how long it ran.
    """

    stage: int
    runs: int
    busy_seconds: float


class ProcessStatus(Struct, frozen=True, kw_only=True, tag="status"):
    """A heartbeat.

    Attributes:
        stages: the counts of its stages.
        last_number: the number of the last request that it has run.
        pending_requests: the number of requests that it has not run yet. The front knows it.
        sequences: the number of sequences whose state it keeps.
        sent_bytes: the bytes that it has sent to other processes.
    """

    stages: tuple[StageCounts, ...] = ()
    last_number: int = 0
    pending_requests: int = 0
    sequences: int = 0
    sent_bytes: int = 0


class RequestError(Struct, frozen=True, kw_only=True, tag="error"):
    """A stage failed on a request.

    Attributes:
        request: the number of the request.
        stage: the number of the stage.
        error: what it raised.
    """

    request: int
    stage: int
    error: ErrorReport


class ProcessClosed(Struct, frozen=True, kw_only=True, tag="closed"):
    """The last status of a process, which has run all requests and ends.

    Attributes:
        error: the error that ends it, if it is one.
    """

    error: ErrorReport | None = None


class ProcessLost(Struct, frozen=True, kw_only=True, tag="lost"):
    """What the front tells the others of a process that is gone.

    Attributes:
        message: which process, and why.
        stages: its stages.
        host: the name of its machine.
        is_expected: it has ended by itself, without an error.
    """

    message: str
    stages: tuple[int, ...]
    host: str
    is_expected: bool


Status = ProcessStatus | RequestError | SpanReport | ProcessClosed | ProcessLost
_DECODER = msgspec.json.Decoder(Status)


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
        if isinstance(status, RequestError) and len(status.error.message) > _LONGEST_MESSAGE:
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
