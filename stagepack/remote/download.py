"""Download files in chunks, several at a time. A file is complete when each of its chunks was compared with its digest."""

import contextlib
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stagepack.errors import Problem, RemoteError
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import CHUNK_BYTES, File, FileChunk, file_chunks
from stagepack.format.rules import rule_error
from stagepack.remote.cache import PartFile
from stagepack.remote.local_chunks import LocalChunks
from stagepack.remote.store import (
    FetchError,
    MissingFileError,
    PermanentFetchError,
    RangesIgnoredError,
    RemoteStore,
    WrongSizeError,
)

# Requests at a time. Each holds one chunk in memory.
CONNECTIONS: Final = 8
# Tries in a row that bring less than `_PROGRESS_BYTES`, after which a download has failed; and how often content may be wrong.
_TRIES: Final = 5
_WRONG_CONTENTS: Final = 3
_PROGRESS_BYTES: Final = CHUNK_BYTES // 16
# A process that is killed loses what came in this time. Without it, it lost a chunk of each connection: 128 MiB.
_WRITE_SECONDS: Final = 1.0
# The last block that a killed process has written may not be filled. Blocks have 4 KiB, on some machines 64 KiB.
_BLOCK_BYTES: Final = 2**16
# Seconds before the second try; doubled for each further one, up to the largest.
FIRST_PAUSE_SECONDS = 0.5
LARGEST_PAUSE_SECONDS = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class FileDownload:
    """A file to download, and what its bytes are written to."""

    entry: File
    part: PartFile
    # Called by several threads with the index of each chunk that is written and right.
    on_chunk: Callable[[int], None] = lambda _: None
    # The chunks that are not written yet.
    remaining: set[int] = field(default_factory=set)
    # Held by the thread that reads all of them in one request, where the server has no ranges.
    whole_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.remaining.update(chunk.index for chunk in file_chunks(self.entry))


class Tries:
    """Counts the tries of one read, and waits between them."""

    def __init__(self, location: str, stop: threading.Event | None = None) -> None:
        self._location = location
        self._stop = stop or threading.Event()
        self._failed = 0
        self._wrong_contents = 0

    def failed(self, error: FetchError, progress_bytes: int = 0) -> None:
        """Wait before the next try, after one that brought some bytes; raise an error if there is none."""
        if isinstance(error, WrongSizeError):
            raise rule_error("D1", self._location, str(error)) from None
        if isinstance(error, MissingFileError):
            raise RemoteError(f"{self._location}: the file is missing: {error}: ask for a complete bundle") from None
        self._failed = 1 if progress_bytes >= _PROGRESS_BYTES else self._failed + 1
        if isinstance(error, PermanentFetchError):
            raise RemoteError(f"{self._location}: {error}") from None
        if self._failed >= _TRIES:
            raise RemoteError(
                f"{self._location}: {error}; tried {self._failed} times. What was downloaded stays: repeat the call to go on"
            ) from None
        pause = FIRST_PAUSE_SECONDS * 2 ** (self._failed - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        if error.retry_seconds is not None:
            pause = max(pause, error.retry_seconds)
        if self._stop.wait(min(pause, LARGEST_PAUSE_SECONDS)):
            raise RemoteError(f"{self._location}: cancelled")

    def wrong_content(self, problem: Problem) -> None:
        """Count content that is not the one of the manifest."""
        self._wrong_contents += 1
        if self._wrong_contents >= _WRONG_CONTENTS:
            message = f"{problem.message}; downloaded {self._wrong_contents} times. Use another mirror, or ask for the right file"
            raise rule_error(problem.rule, self._location, message)


def read_small(store: RemoteStore, location: str, file_name: str, max_bytes: int) -> bytes:
    """Return the content of a file, in several tries; see `RemoteStore.read_small`. Raises a MissingFileError if there is none."""
    tries = Tries(f"{location}/{file_name}")
    while True:
        try:
            return store.read_small(file_name, max_bytes)
        except MissingFileError:
            raise
        except FetchError as error:
            tries.failed(error)


class Download:
    """One download of several files."""

    def __init__(
        self, store: RemoteStore, location: str, progress: ByteProgress, local_chunks: LocalChunks | None = None
    ) -> None:
        self._store = store
        self._location = location
        self._progress = progress
        self._local_chunks = local_chunks or LocalChunks((), ())
        self._stop = threading.Event()
        self._has_ranges = True

    def cancel(self) -> None:
        """End the download with a `RemoteError`, also before it has begun."""
        self._stop.set()
        self._store.cancel()

    def run(self, downloads: Sequence[FileDownload]) -> Generator[FileDownload]:
        """Download files, and yield each when all its bytes are written. Chunks that are written already, and right, are kept.

        The first chunks of all files come first: they have the headers of weight files, by which tensors are placed.
        """
        chunks = [(download, chunk) for download in downloads for chunk in file_chunks(download.entry)]
        tasks = deque(sorted(chunks, key=lambda task: task[1].index > 0))
        results: queue.SimpleQueue[FileDownload | BaseException] = queue.SimpleQueue()
        # Threads of a ThreadPoolExecutor would make the interpreter wait at its end until all is downloaded.
        threads = [
            threading.Thread(target=self._take_chunks, args=(tasks, results), name="stagepack-download", daemon=True)
            for _ in range(CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        try:
            unfinished = Counter(download.entry.name for download, _ in chunks)
            for _ in chunks:
                done = results.get()
                if isinstance(done, BaseException):
                    raise done
                unfinished[done.entry.name] -= 1
                if not unfinished[done.entry.name]:
                    yield done
        finally:
            self.cancel()
            for thread in threads:
                thread.join()

    def _take_chunks(
        self, tasks: deque[tuple[FileDownload, FileChunk]], results: queue.SimpleQueue[FileDownload | BaseException]
    ) -> None:
        """Download chunks until there are no further ones; put the file of each, or the error, among the results."""
        while True:
            try:
                download, chunk = tasks.popleft()
            except IndexError:
                return
            try:
                self._take_chunk(download, chunk)
            except BaseException as error:  # noqa: BLE001 - the one who waits for the result raises it
                results.put(error)
                return
            results.put(download)

    def _take_chunk(self, download: FileDownload, chunk: FileChunk) -> None:
        """Download one chunk, unless the file or another bundle has it."""
        if self._stop.is_set():
            raise RemoteError(f"{self._location}: cancelled")
        written = download.part.read(chunk.start, chunk.end)
        is_written = chunk.check(written) is None
        if not is_written and (local := self._local_chunks.read(chunk)) is not None:
            download.part.write(local, chunk.start)
            is_written = True
        if is_written:
            self._finish_chunk(download, chunk.index, chunk.end - chunk.start)
            return
        if self._has_ranges:
            content = _ChunkContent(download.part, chunk.start, written[:-_BLOCK_BYTES])
            try:
                self._read_chunk(chunk, content)
            except RangesIgnoredError:
                self._has_ranges = False
            else:
                content.write()
                self._finish_chunk(download, chunk.index)
                return
        with download.whole_lock:
            if download.remaining:
                self._read_whole(download)

    def _read_chunk(self, chunk: FileChunk, content: "_ChunkContent") -> None:
        """Read the bytes of a chunk that are missing. A try goes on where the last one ended."""
        tries = Tries(f"{self._location}/{chunk.entry.name}", self._stop)
        sink = self._counting(content.add)
        kept_bytes = content.size
        self._progress(kept_bytes)
        while True:
            start = chunk.start + content.size
            try:
                if start < chunk.end:
                    self._store.read_range(chunk.entry.name, start, chunk.end, chunk.entry.size, sink)
            except RangesIgnoredError:
                self._progress(-content.size)
                raise
            except FetchError as error:
                tries.failed(error, chunk.start + content.size - start)
                continue
            problem = content.check(chunk)
            if problem is None:
                return
            self._progress(-content.size)
            content.clear()
            if kept_bytes:
                kept_bytes = 0  # the bytes of a former process were wrong, and not the bytes of the server
            else:
                tries.wrong_content(problem)

    def _read_whole(self, download: FileDownload) -> None:
        """Download a file in one request, for servers without ranges."""
        tries = Tries(f"{self._location}/{download.entry.name}", self._stop)
        while download.remaining:
            writer = _ChunkWriter(download, self._finish_chunk)
            missing_count = len(download.remaining)
            try:
                sink = self._counting(writer.add, count=False)
                self._store.read_whole(download.entry.name, download.entry.size, sink)
            except FetchError as error:
                if writer.write_error is not None:
                    raise writer.write_error from None
                tries.failed(error, CHUNK_BYTES * (missing_count - len(download.remaining)))
            if writer.problem is not None:
                tries.wrong_content(writer.problem)

    def _counting(self, sink: Callable[[bytes], object], *, count: bool = True) -> Callable[[bytes], None]:
        """Return a sink that reports its bytes, and takes no more when the download has failed elsewhere."""

        def counting_sink(piece: bytes) -> None:
            if self._stop.is_set():
                raise PermanentFetchError("cancelled")
            sink(piece)
            if count:
                self._progress(len(piece))

        return counting_sink

    def _finish_chunk(self, download: FileDownload, chunk_index: int, progress_bytes: int = 0) -> None:
        download.remaining.discard(chunk_index)
        download.on_chunk(chunk_index)
        self._progress(progress_bytes)


class _ChunkContent:
    """The bytes of one chunk as they come. What a slow connection brings is written every second, before it can be compared."""

    def __init__(self, part: PartFile, start: int, kept: bytes) -> None:
        self._part = part
        self._start = start
        self._content = bytearray(kept)
        self._written_bytes = len(kept)
        self._written_at = time.monotonic()

    @property
    def size(self) -> int:
        """The number of bytes that have come."""
        return len(self._content)

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self._content += piece
        if time.monotonic() - self._written_at >= _WRITE_SECONDS:
            # `write` at the end says it: the store would take an error here for one of the connection.
            with contextlib.suppress(OSError):
                self.write()
            self._written_at = time.monotonic()

    def write(self) -> None:
        """Write what is not written yet."""
        self._part.write(self._content[self._written_bytes :], self._start + self._written_bytes)
        self._written_bytes = len(self._content)

    def check(self, chunk: FileChunk) -> Problem | None:
        """See `FileChunk.check`."""
        return chunk.check(memoryview(self._content))

    def clear(self) -> None:
        """Begin again at the first byte."""
        self._content.clear()
        self._written_bytes = 0


class _ChunkWriter:
    """Takes a file from its first byte on, and writes the chunks that are missing and have the right digest."""

    def __init__(self, download: FileDownload, finish_chunk: Callable[[FileDownload, int, int], None]) -> None:
        # What is wrong with the first chunk that is not as expected.
        self.problem: Problem | None = None
        # A chunk could not be written. The store must not take it for an error of the connection.
        self.write_error: OSError | None = None
        self._download = download
        self._finish_chunk = finish_chunk
        self._chunks = iter(file_chunks(download.entry))
        self._chunk = next(self._chunks)
        self._content = bytearray()

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        remaining = memoryview(piece)
        while remaining:
            chunk = self._chunk
            taken = remaining[: chunk.end - chunk.start - len(self._content)]
            self._content += taken
            remaining = remaining[len(taken) :]
            if len(self._content) == chunk.end - chunk.start:
                self._end_chunk(chunk)
                self._content.clear()
                self._chunk = next(self._chunks, chunk)

    def _end_chunk(self, chunk: FileChunk) -> None:
        if chunk.index not in self._download.remaining:
            return
        problem = chunk.check(memoryview(self._content))
        if problem is not None:
            self.problem = self.problem or problem
            return
        try:
            self._download.part.write(self._content, chunk.start)
        except OSError as error:
            self.write_error = error
            raise PermanentFetchError("cancelled") from None
        self._finish_chunk(self._download, chunk.index, len(self._content))
