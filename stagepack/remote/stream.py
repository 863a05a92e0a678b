"""Files of a remote bundle that are read while they are downloaded: each read waits for its own chunks."""

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stagepack.errors import RemoteError, StagepackError, repeated_error
from stagepack.format.chunks import File, file_chunks
from stagepack.format.rules import rule_error


@dataclass(slots=True, eq=False)
class _StreamedFile:
    """A file of which chunks arrive. Its descriptor stays valid when the complete file gets its name."""

    descriptor: int | None = None
    chunks: set[int] = field(default_factory=set)
    is_complete: bool = False

    def has(self, chunk_indices: Sequence[int]) -> bool:
        return self.is_complete or self.chunks.issuperset(chunk_indices)


class Arrivals:
    """The files of a stream, by their digests, shared by all its handles. Threads that download tell it how they proceed."""

    def __init__(self, entries: Sequence[File]) -> None:
        self.change = threading.Condition()
        self.files = {entry.blake3: _StreamedFile() for entry in entries}
        self.error: StagepackError | None = None
        self.handle_count = 0
        self._is_cancelled = False
        self._descriptors: list[int] = []
        self._cancels: list[Callable[[], None]] = []

    def began(self, cancel: Callable[[], None]) -> None:
        """A download has begun; `cancel` ends it."""
        with self.change:
            self._cancels.append(cancel)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel()

    def opened(self, entry: File, path: Path) -> None:
        """A file is at a path. It has no bytes yet."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with self.change:
            self._descriptors.append(descriptor)
            file = self.files[entry.blake3]
            file.descriptor = descriptor
            file.chunks.clear()

    def arrived(self, entry: File, chunk_index: int) -> None:
        """A chunk of an opened file is written, and was compared with its digest."""
        with self.change:
            self.files[entry.blake3].chunks.add(chunk_index)
            self.change.notify_all()

    def completed(self, entry: File, path: Path) -> None:
        """A file is complete at a path."""
        file = self.files[entry.blake3]
        if file.is_complete:
            return
        if file.descriptor is None:
            self.opened(entry, path)
        with self.change:
            file.is_complete = True
            self.change.notify_all()

    def fail(self, error: StagepackError) -> None:
        """The files that are not complete will not come."""
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


class DownloadStream:
    """A handle of files that are being downloaded: see `stagepack.format.file_source.FileStream`."""

    def __init__(self, entries: Mapping[str, File], arrivals: Arrivals) -> None:
        self._entries = entries
        self._arrivals = arrivals
        with arrivals.change:
            arrivals.handle_count += 1
        self._release = weakref.finalize(self, arrivals.release)

    @classmethod
    def start(cls, entries: Sequence[File], fetch: Callable[[Sequence[File], Arrivals], None]) -> Self:
        """Begin to download files, in a thread."""
        arrivals = Arrivals(entries)
        handle = cls({entry.name: entry for entry in entries}, arrivals)
        arguments = (fetch, list(entries), arrivals)
        threading.Thread(target=_fetch, args=arguments, name="stagepack-stream", daemon=True).start()
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
                raise rule_error("D1", file_name, f"the file ends in the bytes {start} to {start + len(memory)}")
            position += byte_count


def _fetch(fetch: Callable[[Sequence[File], Arrivals], None], entries: Sequence[File], arrivals: Arrivals) -> None:
    try:
        fetch(entries, arrivals)
    except StagepackError as error:
        arrivals.fail(error)
    except BaseException as error:  # noqa: BLE001 - those who wait for the files would wait for ever
        arrivals.fail(RemoteError(f"the download ended: {type(error).__name__}: {error}"))
