"""What the processes of the stages tell the front: that they live, what they have done, errors, and spans of a trace.

- How many bytes of weights the processes of a group have read. The front shows it on its terminal.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import torch
from msgspec import Struct, structs
from torch.distributed.distributed_c10d import Store

from stagepack.format.chunks import ByteProgress
from stagepack.format.reader import Bundle
from stagepack.terminal import byte_progress
from stagepack_loaders.distributed.error_report import ErrorReport
from stagepack_loaders.distributed.group_trace import SpanReport
from stagepack_loaders.distributed.packing import allocate
from stagepack_loaders.distributed.process_group import ProcessGroup, SentMessages
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError

_STATUS_TAG = 2**20  # above all tags of routes
_LENGTH_BYTES = 8
_LARGEST_STATUS = 2**20  # bytes
_LONGEST_MESSAGE = 10_000  # characters
_KEY: Final = "weight bytes read"
_SECONDS_BETWEEN_UPDATES: Final = 0.2


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


class LoadingProgress:
    """Counts what this process reads, and tells the others by their store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._untold_bytes = 0
        self._told_at = -math.inf

    def add(self, byte_count: int) -> None:
        """Count further bytes that this process has read. Several threads may call it."""
        with self._lock:
            self._untold_bytes += byte_count
            if time.monotonic() - self._told_at < _SECONDS_BETWEEN_UPDATES:
                return
            told_bytes, self._untold_bytes = self._untold_bytes, 0
            self._told_at = time.monotonic()
        # The store may have gone: whoever needs it finds that.
        with contextlib.suppress(RuntimeError):
            self._store.add(_KEY, told_bytes)

    def poll(self) -> None:
        """Tell what was read. The front shows what all processes have read."""
        self.add(0)


class _ShownProgress(LoadingProgress):
    """The progress of the front, which shows that of all processes."""

    def __init__(self, store: Store, show_bytes: ByteProgress) -> None:
        super().__init__(store)
        self._show_bytes = show_bytes
        self._shown_bytes = 0
        self._polled_at = time.monotonic()

    def add(self, byte_count: int) -> None:
        self._show_bytes(byte_count)

    def poll(self) -> None:
        if time.monotonic() - self._polled_at >= _SECONDS_BETWEEN_UPDATES:
            self.update()

    def update(self) -> None:
        """Show what all processes have told."""
        self._polled_at = time.monotonic()
        with contextlib.suppress(RuntimeError):
            read_bytes = self._store.add(_KEY, 0)
            self._show_bytes(read_bytes - self._shown_bytes)
            self._shown_bytes = read_bytes


@contextlib.contextmanager
def loading_progress(
    store: Store, rank: int, bundle: Bundle, rank_of_stage: Sequence[int]
) -> Iterator[LoadingProgress]:
    """Show on the terminal of the front how many bytes the processes have read, while they load their stages."""
    if rank != FRONT_RANK:
        yield LoadingProgress(store)
        return
    read_files = {
        (stage_rank, file_name)
        for stage_rank, stage in zip(rank_of_stage, bundle.stages, strict=True)
        for file_name in stage.weights
    }
    total_bytes = sum(bundle.files[file_name].size for _, file_name in read_files)
    with byte_progress(f"loading {bundle.location}", total_bytes) as show_bytes:
        progress = _ShownProgress(store, show_bytes)
        yield progress
        progress.update()
