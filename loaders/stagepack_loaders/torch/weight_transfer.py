"""Bytes of weight files on their way into the memory of a device, by threads."""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy
import torch

from stagepack.format.threads import usable_cpu_count
from stagepack_loaders.weight_files import DIRECT_ALIGNMENT, WeightReader

# A piece is read into memory, hashed, and copied to the device. Smaller ones cost more of the interpreter lock: 16 MiB chunks of 8 GB
# in pieces of 1 MiB are 8,000 reads. Larger ones need more page-locked memory, which takes 0.3 s per GB to allocate.
PIECE_BYTES: Final = 4 * 2**20
_STAGED_PIECES: Final = 2
# On the CPU a piece is in the cache while it is hashed and copied.
_CACHED_BYTES: Final = 2**20
_MOST_THREADS: Final = 16


class Hasher(Protocol):
    """Takes the bytes of a range in order."""

    def update(self, content: memoryview, /) -> Any:
        """Add bytes."""


class TransferThreads:
    """Threads that run tasks in the order in which they were submitted. They end with the object, and with the process."""

    def __init__(self, thread_count: int | None = None) -> None:
        self._thread_count = thread_count or min(usable_cpu_count(), _MOST_THREADS)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        # Daemon threads: the interpreter would wait for others at its end, before any function that could stop them is called.
        weakref.finalize(self, _close, self._is_closed, self._tasks, self._threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task, which raises nothing, when a thread is free. It must not refer to this object."""
        with self._lock:
            if len(self._threads) < self._thread_count:
                thread = threading.Thread(
                    target=_run_tasks, args=(self._tasks, self._is_closed), name="stagepack-weights", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._tasks.put(task)


def _run_tasks(tasks: "queue.SimpleQueue[Callable[[], None] | None]", is_closed: threading.Event) -> None:
    while (task := tasks.get()) is not None and not is_closed.is_set():
        task()
        del task  # what it refers to is freed before the next one comes


def _close(
    is_closed: threading.Event,
    tasks: "queue.SimpleQueue[Callable[[], None] | None]",
    threads: list[threading.Thread],
) -> None:
    is_closed.set()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        # A thread may drop the last reference to the object itself. One that waits for a slow disk is not waited for.
        if thread is not threading.current_thread():
            thread.join(timeout=1)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of the bytes of a file.

    Attributes:
        file_name: the name of the file in the bundle.
        start: the first byte.
        end: the byte after the last one.
    """

    file_name: str
    start: int
    end: int


class DeviceWriter:
    """Writes bytes of files into the memory of one device. It is called by the threads that do it."""

    def __init__(self, device: torch.device, reader: WeightReader, *, is_staged: bool | None = None) -> None:
        self.device = device
        self._reader = reader
        self._is_staged = device.type != "cpu" if is_staged is None else is_staged
        self._of_thread = threading.local()

    def write(self, source: ByteRange, memory: torch.Tensor, hasher: Hasher | None, after: Any = None) -> Any:
        """Copy a range of a file into memory of the device.

        memory: contiguous bytes of the device, as many as the range has.
        hasher: is given the bytes, in order; None to hash nothing.
        after: an event of the device, before which the memory is still in use; None if it is free.
        The result is the event of the device after which the bytes are there; None if they are there now.
        """
        if self._is_staged or hasher is not None:
            return self._write_staged(source, memory, hasher, after)
        self._reader.read_into(source.file_name, source.start, _writeable_view(memory))
        return None

    def _write_staged(self, source: ByteRange, memory: torch.Tensor, hasher: Hasher | None, after: Any) -> Any:
        """Read into pieces of memory of the thread, from which the device copies while the next piece is read.

        They are hashed there, also on the CPU: weights are visible to the user, who may write them.
        """
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = _Staging(self.device)
        staging: _Staging = self._of_thread.staging
        staging.begin(memory, after)
        for offset in range(0, len(memory), staging.piece_bytes):
            device_piece = memory[offset : offset + staging.piece_bytes]
            staged_piece = staging.next_piece()[: len(device_piece)]
            view = _writeable_view(staged_piece)
            self._reader.read_into(source.file_name, source.start + offset, view)
            if hasher is not None:
                hasher.update(view)
            staging.copy(staged_piece, device_piece)
        return staging.end()


class _Staging:
    """The pieces of host memory of one thread, and the stream that copies them to the device. The CPU has no stream."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._stream, self.piece_bytes = None, _CACHED_BYTES
            self._pieces = [empty_bytes(_CACHED_BYTES, device)]
        else:
            self._stream, self.piece_bytes = torch.cuda.Stream(device), PIECE_BYTES
            memory = torch.empty(PIECE_BYTES * _STAGED_PIECES, dtype=torch.uint8, pin_memory=True)
            self._pieces = list(memory.split(PIECE_BYTES))
        self._copied: list[Any] = [None] * len(self._pieces)
        self._index = 0

    def begin(self, memory: torch.Tensor, after: Any) -> None:
        """Begin to write memory of the device, which is in use before the event `after`."""
        if self._stream is not None:
            # If the memory is freed before the copies are made, the allocator keeps it until they are.
            memory.record_stream(self._stream)
            if after is not None:
                self._stream.wait_event(after)

    def next_piece(self) -> torch.Tensor:
        """Return host memory whose last copy is finished."""
        self._index = (self._index + 1) % len(self._pieces)
        if self._copied[self._index] is not None:
            self._copied[self._index].synchronize()
        return self._pieces[self._index]

    def copy(self, staged_piece: torch.Tensor, device_piece: torch.Tensor) -> None:
        """Begin to copy the memory that `next_piece` returned."""
        if self._stream is None:
            # torch would share the copy among threads of its own.
            numpy.copyto(device_piece.numpy(), staged_piece.numpy())
            return
        with torch.cuda.stream(self._stream):
            device_piece.copy_(staged_piece, non_blocking=True)
        self._copied[self._index] = self._record()

    def end(self) -> Any:
        """Return the event after which all copies are made."""
        return None if self._stream is None else self._record()

    def _record(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def current_event(device: torch.device) -> Any:
    """Return an event after all work that the current stream of a device was given; None on the CPU.

    Memory that was just allocated may still be in use by work that was given before.
    """
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def empty_bytes(byte_count: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory of a device, whose address allows direct reads on the CPU."""
    memory = torch.empty(byte_count + DIRECT_ALIGNMENT, dtype=torch.uint8, device=device)
    offset = -memory.data_ptr() % DIRECT_ALIGNMENT
    return memory[offset : offset + byte_count]


def _writeable_view(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)
