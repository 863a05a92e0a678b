"""Bytes of weight files on their way into the memory of a device, by threads: ranges, or whole files by chunk."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy
import torch
from blake3 import blake3

from stagepack.errors import DigestError, StagepackError, repeated_error
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.reader import Bundle
from stagepack.format.rules import rule_error
from stagepack.format.threads import usable_cpu_count
from stagepack_loaders.weight_files import DIRECT_ALIGNMENT, ReadInto

# A piece is read into memory, hashed, and copied to the device. Smaller ones cost more of the interpreter lock: 16 MiB chunks of 8 GB
# in pieces of 1 MiB are 8,000 reads. Larger ones need more page-locked memory, which takes 0.3 s per GB to allocate.
_PIECE_BYTES: Final = 4 * 2**20
_STAGED_PIECES: Final = 2
# On the CPU a piece is in the cache while it is hashed and copied.
_CACHED_BYTES: Final = 2**20
_MOST_THREADS: Final = 16

# Called when a range was read: with the event of the device after which the bytes are there, None if they are there now, and the error.
Arrived = Callable[[Any, StagepackError | None], None]


class ByteRange(NamedTuple):
    """A range of the bytes of a file of a bundle, half-open."""

    file_name: str
    start: int
    end: int


class Transfers:
    """Threads that read ranges of files into memory of a device, in the order of `submit`. They end with the object."""

    def __init__(self, device: torch.device, read_into: ReadInto) -> None:
        self._device = device
        self._read_into = read_into
        self._thread_count = min(usable_cpu_count(), _MOST_THREADS)
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        # Daemon threads: the interpreter would wait for others at its end, before any function that could stop them is called.
        weakref.finalize(self, _close, self._is_closed, self._tasks, self._threads)

    def submit(self, source: ByteRange, memory: torch.Tensor, after: Any, arrived: Arrived, hasher: Any = None) -> None:
        """Read a range into contiguous bytes of the device, as many as it has, when a thread is free.

        after: an event of the device, before which the memory is still in use; None if it is free.
        hasher: is given the bytes, in order; None to hash nothing.
        """
        with self._lock:
            if len(self._threads) < self._thread_count:
                arguments = (self._tasks, self._is_closed, self._device)
                thread = threading.Thread(target=_run_tasks, args=arguments, name="stagepack-weights", daemon=True)
                self._threads.append(thread)
                thread.start()
        # A task must not refer to this object, which would not end before its threads.
        self._tasks.put(partial(_transfer, self._read_into, source, memory, after, arrived, hasher))


def _run_tasks(tasks: "_Tasks", is_closed: threading.Event, device: torch.device) -> None:
    staging = _Staging(device)
    while (task := tasks.get()) is not None and not is_closed.is_set():
        task(staging)
        del task  # what it refers to is freed before the next one comes


def _close(is_closed: threading.Event, tasks: "_Tasks", threads: list[threading.Thread]) -> None:
    is_closed.set()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        # A thread may drop the last reference to the object itself. One that waits for a slow disk is not waited for.
        if thread is not threading.current_thread():
            thread.join(timeout=1)


def _transfer(
    read_into: ReadInto,
    source: ByteRange,
    memory: torch.Tensor,
    after: Any,
    arrived: Arrived,
    hasher: Any,
    staging: "_Staging",
) -> None:
    event: Any = None
    error: StagepackError | None = None
    try:
        event = staging.write(read_into, source, memory, after, hasher)
    except StagepackError as read_error:
        error = read_error
    except Exception as unexpected_error:  # noqa: BLE001 - the thread would end, and a call would wait for ever
        message = f"the file cannot be loaded: {unexpected_error}"
        error = rule_error("D1", source.file_name, message)
    arrived(event, error)


class _Staging:
    """Pieces of host memory of one thread, from which the device copies while the next piece is read. The CPU has no stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pieces: list[torch.Tensor] = []
        self._copied: list[Any] = []
        self._index = 0

    def write(
        self, read_into: ReadInto, source: ByteRange, memory: torch.Tensor, after: Any, hasher: Any = None
    ) -> Any:
        """Read a range into memory of the device; return the event after which the bytes are there."""
        if self._device.type == "cpu" and hasher is None:
            read_into(source.file_name, source.start, _writeable_view(memory))
            return None
        # Bytes are hashed in a piece also on the CPU: weights are visible to the user, who may write them.
        if not self._pieces:
            self._allocate()
        if self._stream is not None:
            # If the memory is freed before the copies are made, the allocator keeps it until they are.
            memory.record_stream(self._stream)
            if after is not None:
                self._stream.wait_event(after)
        piece_bytes = len(self._pieces[0])
        for offset in range(0, len(memory), piece_bytes):
            device_piece = memory[offset : offset + piece_bytes]
            piece = self._next_piece()[: len(device_piece)]
            view = _writeable_view(piece)
            read_into(source.file_name, source.start + offset, view)
            if hasher is not None:
                hasher.update(view)
            self._copy(piece, device_piece)
        return None if self._stream is None else _recorded(self._stream)

    def _allocate(self) -> None:
        if self._device.type == "cpu":
            self._pieces = [empty_bytes(_CACHED_BYTES, self._device)]
        else:
            self._stream = torch.cuda.Stream(self._device)
            memory = torch.empty(_PIECE_BYTES * _STAGED_PIECES, dtype=torch.uint8, pin_memory=True)
            self._pieces = list(memory.split(_PIECE_BYTES))
        self._copied = [None] * len(self._pieces)

    def _next_piece(self) -> torch.Tensor:
        """Return host memory whose last copy is finished."""
        self._index = (self._index + 1) % len(self._pieces)
        if self._copied[self._index] is not None:
            self._copied[self._index].synchronize()
        return self._pieces[self._index]

    def _copy(self, piece: torch.Tensor, device_piece: torch.Tensor) -> None:
        """Begin to copy the memory that `_next_piece` returned."""
        if self._stream is None:
            # torch would share the copy among threads of its own.
            numpy.copyto(device_piece.numpy(), piece.numpy())
            return
        with torch.cuda.stream(self._stream):
            device_piece.copy_(piece, non_blocking=True)
        self._copied[self._index] = _recorded(self._stream)


_Tasks = queue.SimpleQueue[Callable[[_Staging], None] | None]


class ArrivingFile:
    """A weight file in the memory of a device. Its chunks arrive in any order.

    Attributes:
        memory: the bytes of the file; the bytes of chunks that have not arrived are undefined.
    """

    def __init__(self, bundle: Bundle, entry: File, device: torch.device, progress: ByteProgress | None) -> None:
        self.memory = empty_bytes(entry.size, device)
        self._allocated = current_event(device)
        self._bundle = bundle
        self._entry = entry
        self._progress = progress
        self._chunks = file_chunks(entry)
        self._tensor_bytes: dict[tuple[int, int], torch.Tensor] = {}
        self._arrival = threading.Condition()
        self._events: dict[int, Any] = {}
        self._errors: dict[int, StagepackError] = {}

    def read(self, transfers: Transfers, *, verify: bool) -> None:
        """Begin to read all chunks. Errors are raised by `wait`."""
        for chunk in self._chunks:
            hasher = blake3() if verify else None
            source = ByteRange(self._entry.name, chunk.start, chunk.end)
            arrived = partial(self._take_chunk, chunk, hasher)
            transfers.submit(source, self.memory[chunk.start : chunk.end], self._allocated, arrived, hasher)

    def _take_chunk(self, chunk: FileChunk, hasher: Any, event: Any, error: StagepackError | None) -> None:
        problem = chunk.problem(hasher.hexdigest()) if error is None and hasher is not None else None
        if problem is not None:
            error = DigestError([problem])
            if self._bundle.source is not None:
                # An error of any kind would end the thread, and a call would wait for ever.
                with contextlib.suppress(Exception):
                    self._bundle.source.discard([self._entry])  # so that the next load downloads it again
        if self._progress is not None:
            self._progress(chunk.end - chunk.start)
        with self._arrival:
            if error is None:
                self._events[chunk.index] = event
            else:
                self._errors[chunk.index] = error
            self._arrival.notify_all()

    def tensor_bytes(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes of a stored tensor, as a tensor with a storage of its own, which shares the memory.

        Buffers that calls write are copied and exchanged by storage.
        """
        if (start, end) not in self._tensor_bytes:
            offset = self.memory.storage_offset()
            storage = self.memory.untyped_storage()[offset + start : offset + end]
            self._tensor_bytes[start, end] = torch.empty(0, dtype=torch.uint8, device=self.memory.device).set_(storage)
        return self._tensor_bytes[start, end]

    def wait(self, start: int = 0, end: int | None = None) -> None:
        """Return when a range of bytes has arrived; by default, all."""
        for chunk in file_chunks(self._entry, start, end) if start != end else ():
            with self._arrival:
                self._arrival.wait_for(lambda index=chunk.index: index in self._events or index in self._errors)  # type: ignore[misc]
                if chunk.index in self._errors:
                    raise repeated_error(self._errors[chunk.index])
                event = self._events[chunk.index]
            # Not the current stream alone: later calls may be made on others.
            if event is not None:
                event.synchronize()

    def has_arrived(self) -> bool:
        """Whether all chunks have arrived, without an error."""
        return len(self._events) == len(self._chunks)


class ArrivingFiles:
    """The weight files of stages on one device. Threads read them in the order in which they are added.

    The threads end when the object is gone: keep it as long as files are to arrive.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: torch.device,
        read_into: ReadInto,
        *,
        verify: bool,
        progress: ByteProgress | None = None,
    ) -> None:
        self._bundle = bundle
        self._device = device
        self._progress = progress
        self._verify = verify
        self._transfers = Transfers(device, read_into)
        self._files: dict[str, ArrivingFile] = {}

    def add(self, file_names: Iterable[str]) -> dict[str, ArrivingFile]:
        """Return files, which are read from now on."""
        files = {}
        for file_name in file_names:
            if file_name not in self._files:
                file = ArrivingFile(self._bundle, self._bundle.files[file_name], self._device, self._progress)
                file.read(self._transfers, verify=self._verify)
                self._files[file_name] = file
            files[file_name] = self._files[file_name]
        return files


def current_event(device: torch.device) -> Any:
    """Return an event after all work that the current stream of a device was given; None on the CPU.

    Memory that was just allocated may still be in use by work that was given before.
    """
    return None if device.type == "cpu" else _recorded(torch.cuda.current_stream(device))


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def empty_bytes(byte_count: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory of a device, whose address allows direct reads on the CPU."""
    memory = torch.empty(byte_count + DIRECT_ALIGNMENT, dtype=torch.uint8, device=device)
    offset = -memory.data_ptr() % DIRECT_ALIGNMENT
    return memory[offset : offset + byte_count]


def _writeable_view(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)
