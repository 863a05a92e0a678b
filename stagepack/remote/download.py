"""Download files in chunks, several at a time. Each chunk is compared with its digest before it is written."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from stagepack.errors import DigestError, Problem, RemoteError
from stagepack.format.chunks import CHUNK_BYTES, ByteProgress, FileChunk, file_chunks
from stagepack.format.manifest import File
from stagepack.remote.download_threads import DownloadThreads
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
            raise DigestError([Problem(rule="D1", where=self._location, message=str(error))]) from None
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
            raise DigestError([Problem(rule=problem.rule, where=self._location, message=message)])


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
