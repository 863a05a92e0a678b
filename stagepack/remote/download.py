"""Download files in chunks, several at a time. Each chunk is compared with its digest before it is written.

- Threads that download.
- Files of a remote bundle that are read while they are downloaded: each read waits for its own chunks.
"""

# Long because a chunk that is interrupted, resumed and checked passes through threads and streams of one download.

import os
import queue
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self

from stagepack.errors import Problem, RemoteError, StagepackError, repeated_error
from stagepack.format.chunks import CHUNK_BYTES, ByteProgress, File, FileChunk, file_chunks
from stagepack.format.rules import rule_error
from stagepack.remote.store import FetchError, MissingFileError, RangesIgnoredError, RemoteStore, WrongSizeError

# Requests at a time. Each holds one chunk in memory.
CONNECTIONS: Final = 8
# Tries in a row that bring less than `_PROGRESS_BYTES`, after which a download has failed; and how often content may be wrong.
_TRIES: Final = 5
_WRONG_CONTENTS: Final = 3
_PROGRESS_BYTES: Final = CHUNK_BYTES // 16
# Seconds before the second try; doubled for each further one, up to the largest.
FIRST_PAUSE_SECONDS = 0.5
LARGEST_PAUSE_SECONDS = 30.0


class DownloadThreads:
    """Runs functions in threads, in the order in which they are submitted.

    Those of `concurrent.futures.ThreadPoolExecutor` would make the interpreter wait at its end until all is downloaded.
    """

    def __init__(self, thread_count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._futures: list[Future[None]] = []
        self._threads = [
            threading.Thread(target=self._run, name="stagepack-download", daemon=True) for _ in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Call a function when a thread is free."""
        future: Future[None] = Future()
        self._futures.append(future)
        self._tasks.put((future, function))
        return future

    def cancel(self) -> None:
        """Call no further function."""
        for future in self._futures:
            future.cancel()
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait for the functions that were called, after `cancel`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - the one who waits for the future raises it
                future.set_exception(error)
            else:
                future.set_result(None)


class WritablePart(Protocol):
    """A file that is being downloaded: `stagepack.remote.cache.PartFile`."""

    def read(self, start: int, end: int) -> bytes | None:
        """Return the bytes from `start` to `end`, not included; None if they were never written."""

    def write(self, content: bytes | bytearray | memoryview, start: int) -> None:
        """Write bytes at a position."""


@dataclass(slots=True, eq=False, kw_only=True)
class FileDownload:
    """A file to download.

    Attributes:
        entry: its manifest entry.
        part: what its bytes are written to.
        on_chunk: called by several threads with the index of each chunk that is written and right.
        remaining: the chunks that are not written yet.
        whole_lock: held by the thread that reads all of them in one request, where the server has no ranges.
    """

    entry: File
    part: WritablePart
    on_chunk: Callable[[int], None] = lambda _: None
    remaining: set[int] = field(default_factory=set)
    whole_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Nothing is written yet."""
        self.remaining.update(chunk.index for chunk in file_chunks(self.entry))


class Tries:
    """Counts the tries of one read, and waits between them."""

    def __init__(self, location: str, stop: threading.Event) -> None:
        self._location = location
        self._stop = stop
        self._failed = 0
        self._wrong_contents = 0

    def failed(self, error: FetchError, progress_bytes: int = 0) -> None:
        """Wait before the next try.

        progress_bytes: how many bytes the try brought.
        """
        if isinstance(error, WrongSizeError):
            raise rule_error("D1", self._location, str(error)) from None
        if isinstance(error, MissingFileError):
            raise RemoteError(f"{self._location}: the file is missing: {error}: ask for a complete bundle") from None
        self._failed = 1 if progress_bytes >= _PROGRESS_BYTES else self._failed + 1
        if not error.temporary:
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


class Download:
    """One download of several files."""

    def __init__(self, store: RemoteStore, location: str, progress: ByteProgress) -> None:
        self._store = store
        self._location = location
        self._progress = progress
        self._stop = threading.Event()
        self._has_ranges = True

    def cancel(self) -> None:
        """End the download with a `RemoteError`, also before it has begun."""
        self._stop.set()
        self._store.cancel()

    def run(self, downloads: Sequence[FileDownload]) -> Generator[FileDownload]:
        """Download files. Chunks that are written already, and right, are kept.

        The first chunks of all files come first: they have the headers of weight files, by which tensors are placed.

        It yields each file, when all its bytes are written.
        """
        future_downloads: dict[Future[None], FileDownload] = {}
        tasks = [(download, chunk) for download in downloads for chunk in file_chunks(download.entry)]
        threads = DownloadThreads(CONNECTIONS)
        try:
            for download, chunk in sorted(tasks, key=lambda task: task[1].index > 0):
                future_downloads[threads.submit(partial(self._take_chunk, download, chunk))] = download
            unfinished = Counter(download.entry.name for download in future_downloads.values())
            for future in as_completed(future_downloads):
                future.result()
                download = future_downloads[future]
                unfinished[download.entry.name] -= 1
                if not unfinished[download.entry.name]:
                    yield download
        finally:
            threads.cancel()
            self.cancel()
            threads.join()

    def _take_chunk(self, download: FileDownload, chunk: FileChunk) -> None:
        """Download one chunk, unless the file has it."""
        written = download.part.read(chunk.start, chunk.end)
        if written is not None and chunk.check(written) is None:
            self._finish_chunk(download, chunk.index, chunk.end - chunk.start)
            return
        if self._has_ranges:
            try:
                content = self._read_chunk(chunk)
            except RangesIgnoredError:
                self._has_ranges = False
            else:
                download.part.write(content, chunk.start)
                self._finish_chunk(download, chunk.index)
                return
        with download.whole_lock:
            if download.remaining:
                self._read_whole(download)

    def _read_chunk(self, chunk: FileChunk) -> bytearray:
        """Return the content of a chunk. A try goes on where the last one ended."""
        tries = Tries(f"{self._location}/{chunk.entry.name}", self._stop)
        content = bytearray()
        sink = self._counting(content.extend)
        while True:
            start = chunk.start + len(content)
            try:
                if start < chunk.end:
                    self._store.read_range(chunk.entry.name, start, chunk.end, chunk.entry.size, sink)
            except RangesIgnoredError:
                raise
            except FetchError as error:
                tries.failed(error, chunk.start + len(content) - start)
                continue
            problem = chunk.check(memoryview(content))
            if problem is None:
                return content
            self._progress(-len(content))
            content.clear()
            tries.wrong_content(problem)

    def _read_whole(self, download: FileDownload) -> None:
        """Download a file in one request, for servers without ranges."""
        tries = Tries(f"{self._location}/{download.entry.name}", self._stop)
        while download.remaining:
            writer = _ChunkWriter(download, self._finish_chunk)
            missing_count = len(download.remaining)
            try:
                self._store.read_whole(
                    download.entry.name, download.entry.size, self._counting(writer.add, count=False)
                )
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
                raise FetchError("cancelled", temporary=False)
            sink(piece)
            if count:
                self._progress(len(piece))

        return counting_sink

    def _finish_chunk(self, download: FileDownload, chunk_index: int, progress_bytes: int = 0) -> None:
        download.remaining.discard(chunk_index)
        download.on_chunk(chunk_index)
        self._progress(progress_bytes)


class _ChunkWriter:
    """Takes a file from its first byte on, and writes those of its chunks that are missing and right.

    Attributes:
        problem: of the first chunk whose content is wrong.
        write_error: a chunk could not be written. The store must not take it for an error of the connection.
    """

    def __init__(self, download: FileDownload, finish_chunk: Callable[[FileDownload, int, int], None]) -> None:
        self.problem: Problem | None = None
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
        if chunk.index in self._download.remaining:
            problem = chunk.check(memoryview(self._content))
            if problem is None:
                try:
                    self._download.part.write(self._content, chunk.start)
                except OSError as error:
                    self.write_error = error
                    raise FetchError("cancelled", temporary=False) from None
                self._finish_chunk(self._download, chunk.index, len(self._content))
            elif self.problem is None:
                self.problem = problem


class DownloadObserver(Protocol):
    """Is told how a download proceeds, by several threads."""

    def began(self, cancel: Callable[[], None]) -> None:
        """A download has begun; `cancel` ends it."""

    def opened(self, entry: File, path: Path) -> None:
        """A file is at a path. It has no bytes yet."""

    def arrived(self, entry: File, chunk_index: int) -> None:
        """A chunk of an opened file is written, and was compared with its digest."""

    def completed(self, entry: File, path: Path) -> None:
        """A file is complete at a path."""


@dataclass(slots=True, eq=False)
class _StreamedFile:
    """A file of which chunks arrive. Its descriptor stays valid when the complete file gets its name."""

    descriptor: int | None = None
    chunks: set[int] = field(default_factory=set)
    is_complete: bool = False

    def has(self, chunk_indices: Sequence[int]) -> bool:
        return self.is_complete or self.chunks.issuperset(chunk_indices)


class _Arrivals:
    """The files of a stream, by their digests: a `DownloadObserver`, shared by all handles of the stream."""

    def __init__(self, digests: Iterable[str]) -> None:
        self.change = threading.Condition()
        self.files = {digest: _StreamedFile() for digest in digests}
        self.error: StagepackError | None = None
        self.handle_count = 0
        self._is_cancelled = False
        self._descriptors: list[int] = []
        self._cancels: list[Callable[[], None]] = []

    def began(self, cancel: Callable[[], None]) -> None:
        with self.change:
            self._cancels.append(cancel)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel()

    def opened(self, entry: File, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with self.change:
            self._descriptors.append(descriptor)
            file = self.files[entry.blake3]
            file.descriptor = descriptor
            file.chunks.clear()

    def arrived(self, entry: File, chunk_index: int) -> None:
        with self.change:
            self.files[entry.blake3].chunks.add(chunk_index)
            self.change.notify_all()

    def completed(self, entry: File, path: Path) -> None:
        file = self.files[entry.blake3]
        if file.is_complete:
            return
        if file.descriptor is None:
            self.opened(entry, path)
        with self.change:
            file.is_complete = True
            self.change.notify_all()

    def fail(self, error: StagepackError) -> None:
        with self.change:
            self.error = self.error or error
            self.change.notify_all()

    def release(self) -> None:
        """Give up a handle. Without one, nobody waits for the files."""
        with self.change:
            self.handle_count -= 1
            if self.handle_count:
                return
            self._is_cancelled = True
            cancels = list(self._cancels)
        self.fail(RemoteError("the download was cancelled"))
        for cancel in cancels:
            cancel()

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class FileStream:
    """A handle of files that are being downloaded: see `stagepack.format.bundle_files.FileStream`."""

    def __init__(self, entries: Mapping[str, File], arrivals: _Arrivals) -> None:
        self._entries = entries
        self._arrivals = arrivals
        with arrivals.change:
            arrivals.handle_count += 1
        self._release = weakref.finalize(self, arrivals.release)

    @classmethod
    def start(cls, entries: Sequence[File], fetch: Callable[[Sequence[File], DownloadObserver], None]) -> Self:
        """Begin to download files, in a thread."""
        arrivals = _Arrivals({entry.blake3 for entry in entries})
        handle = cls({entry.name: entry for entry in entries}, arrivals)
        threading.Thread(
            target=_fetch, args=(fetch, list(entries), arrivals), name="stagepack-stream", daemon=True
        ).start()
        return handle

    def share(self) -> Self:
        """Return another handle of the same files. When all handles are closed or gone, the download ends."""
        return type(self)(self._entries, self._arrivals)

    def close(self) -> None:
        """Read no further bytes by this handle."""
        self._release()

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes of a file, when they have arrived."""
        entry = self._entries[file_name]
        arrivals = self._arrivals
        file = arrivals.files[entry.blake3]
        needed_chunks = [chunk.index for chunk in file_chunks(entry, start, start + len(memory))]
        with arrivals.change:
            arrivals.change.wait_for(lambda: file.has(needed_chunks) or arrivals.error is not None)
            if not file.has(needed_chunks):
                assert arrivals.error is not None
                raise repeated_error(arrivals.error)
            descriptor = file.descriptor
        assert descriptor is not None
        position = 0
        while position < len(memory):
            byte_count = os.preadv(descriptor, [memory[position:]], start + position)
            if not byte_count:
                message = f"the file ends in the bytes {start} to {start + len(memory)}"
                raise rule_error("D1", file_name, message)
            position += byte_count


def _fetch(
    fetch: Callable[[Sequence[File], DownloadObserver], None], entries: Sequence[File], arrivals: _Arrivals
) -> None:
    try:
        fetch(entries, arrivals)
    except StagepackError as error:
        arrivals.fail(error)
    except BaseException as error:  # noqa: BLE001 - those who wait for the files would wait for ever
        arrivals.fail(RemoteError(f"the download ended: {type(error).__name__}: {error}"))
