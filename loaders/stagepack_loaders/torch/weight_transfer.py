"""Bytes of weight files on their way into the memory of a device, by threads: ranges, or whole files by chunk."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy
import torch
from blake3 import blake3

from stagepack.errors import DigestError, StagepackError, repeated_error
from stagepack.format.chunk_reads import ByteProgress, Fill, fill_in_pieces
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.reader import Bundle
from stagepack.format.rules import rule_error
from stagepack.format.threads import usable_cpu_count
from stagepack_loaders.weight_files import DIRECT_ALIGNMENT, ReadInto

# Smaller blocks cost more of the interpreter lock. Larger ones need more page-locked memory, which takes 0.3 s per GB to allocate.
_BLOCK_BYTES: Final = 4 * 2**20
# On the CPU a block is in the cache while it is hashed and copied.
_CACHED_BYTES: Final = 2**20
_MOST_THREADS: Final = 16
# The blocks beyond one a thread: the device copies these while all threads read.
_COPIED_BLOCKS: Final = 2

# Called when a range was read: with the event of the device after which the bytes are there, None if they are there now, and the error.
Arrived = Callable[[Any, StagepackError | None], None]


class ByteRange(NamedTuple):
    """A range of the bytes of a file of a bundle, half-open."""

    file_name: str
    start: int
    end: int


class BlockCopies(Protocol):
    """How the bytes of blocks of host memory come into the memory of a device. Several threads use it.

    Attributes:
        block_bytes: the size of a block.
    """

    block_bytes: int

    def new_block(self) -> torch.Tensor:
        """Return new host memory of `block_bytes`."""

    def copy(self, block: torch.Tensor, memory: torch.Tensor, after: Any) -> Any:
        """Begin to copy the first bytes of a block, as many as the memory has.

        Args:
            block: from `new_block`.
            memory: bytes of the device.
            after: an event of the device, before which the memory is still in use; None if it is free.

        Returns:
            The event after which this copy and all earlier ones are made; None if they are made now.
        """


class CachedCopies:
    """Blocks for the CPU, which fit the cache of a core. Bytes are hashed in them: the user sees the weights, and may write them."""

    block_bytes = _CACHED_BYTES

    def new_block(self) -> torch.Tensor:
        """See `BlockCopies`."""
        return empty_bytes(self.block_bytes, torch.device("cpu"))

    def copy(self, block: torch.Tensor, memory: torch.Tensor, after: Any) -> None:
        """See `BlockCopies`."""
        # torch would share the copy among threads of its own.
        numpy.copyto(memory.numpy(), block[: len(memory)].numpy())


class StreamCopies:
    """Page-locked blocks, which a GPU copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.block_bytes = _BLOCK_BYTES
        self._stream: Any = torch.cuda.Stream(device)

    def new_block(self) -> torch.Tensor:
        """See `BlockCopies`."""
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, block: torch.Tensor, memory: torch.Tensor, after: Any) -> Any:
        """See `BlockCopies`."""
        # If the memory is freed before the copy is made, the allocator keeps it until it is.
        memory.record_stream(self._stream)
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            memory.copy_(block[: len(memory)], non_blocking=True)
        return _recorded(self._stream)


class BlockRing:
    """Blocks of host memory, at most `most_blocks`, which threads fill and a device copies. A thread has one at a time."""

    def __init__(self, copies: BlockCopies, most_blocks: int) -> None:
        self._copies = copies
        # Blocks that no thread has, None for one to be made, and the event after which it is copied. The first one is free first.
        self._blocks: queue.SimpleQueue[tuple[torch.Tensor | None, Any]] = queue.SimpleQueue()
        for _ in range(most_blocks):
            self._blocks.put((None, None))

    def write(self, fill: Fill, start: int, memory: torch.Tensor, after: Any, hasher: Any) -> Any:
        """Bring the bytes of a file from `start` on into memory of the device; see `BlockCopies.copy`. The hasher is given them too."""
        event = None
        for offset in range(0, len(memory), self._copies.block_bytes):
            part = memory[offset : offset + self._copies.block_bytes]
            block, event = self._blocks.get()
            try:
                if block is None:
                    block = self._copies.new_block()
                if event is not None:
                    event.synchronize()
                    event = None
                for piece in fill_in_pieces(fill, start + offset, _writeable_view(block[: len(part)])):
                    if hasher is not None:
                        hasher.update(piece)
                event = self._copies.copy(block, part, after)
            finally:
                self._blocks.put((block, event))
        return event


class Transfers:
    """Threads that read ranges of files into memory of a device, in the order of `submit`. They end with the object."""

    def __init__(self, device: torch.device, read_into: ReadInto) -> None:
        self._read_into = read_into
        self._thread_count = min(usable_cpu_count(), _MOST_THREADS)
        self._is_host = device.type == "cpu"
        copies = CachedCopies() if self._is_host else StreamCopies(device)
        self._ring = BlockRing(copies, self._thread_count + _COPIED_BLOCKS)
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
                arguments = (self._tasks, self._is_closed)
                thread = threading.Thread(target=_run_tasks, args=arguments, name="stagepack-weights", daemon=True)
                self._threads.append(thread)
                thread.start()
        fill = partial(self._read_into, source.file_name)
        if self._is_host and hasher is None:
            write = partial(fill, source.start, _writeable_view(memory))
        else:
            write = partial(self._ring.write, fill, source.start, memory, after, hasher)
        # A task must not refer to this object, which would not end before its threads.
        self._tasks.put(partial(_transfer, source.file_name, write, arrived))


def _run_tasks(tasks: "_Tasks", is_closed: threading.Event) -> None:
    while (task := tasks.get()) is not None and not is_closed.is_set():
        task()
        del task  # what it refers to is freed before the next one comes


def _close(is_closed: threading.Event, tasks: "_Tasks", threads: list[threading.Thread]) -> None:
    is_closed.set()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        # A thread may drop the last reference to the object itself. One that waits for a slow disk is not waited for.
        if thread is not threading.current_thread():
            thread.join(timeout=1)


def _transfer(file_name: str, write: Callable[[], Any], arrived: Arrived) -> None:
    event: Any = None
    error: StagepackError | None = None
    try:
        event = write()
    except StagepackError as read_error:
        error = read_error
    except Exception as unexpected_error:  # noqa: BLE001 - the thread would end, and a call would wait for ever
        error = rule_error("D1", file_name, f"the file cannot be loaded: {unexpected_error}")
    arrived(event, error)


_Tasks = queue.SimpleQueue[Callable[[], None] | None]


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
