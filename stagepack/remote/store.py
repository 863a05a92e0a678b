"""Where the files of a remote bundle are read from, and how a read fails."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# Takes the bytes of a file as they come, in order.
ByteSink = Callable[[bytes], Any]


class FetchError(Exception):
    """A read failed.

    Attributes:
        temporary: another try may succeed.
        retry_seconds: how long the server asks to wait before it, in seconds; None if it does not say.
    """

    def __init__(self, message: str, *, temporary: bool = True, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.temporary = temporary
        self.retry_seconds = retry_seconds


class MissingFileError(FetchError):
    """The store has no such file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, temporary=False)


class WrongSizeError(FetchError):
    """The file has another size than the manifest states."""

    def __init__(self, message: str) -> None:
        super().__init__(message, temporary=False)


class RangesIgnoredError(FetchError):
    """The server answers a request for a range with the whole file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, temporary=False)


class RemoteStore(ABC):
    """The folder of a remote bundle. Its methods are called by several threads."""

    @abstractmethod
    def read_small(self, file_name: str, max_bytes: int) -> bytes:
        """Return the content of a file, or its first `max_bytes` + 1 bytes if it is larger.

        Raises:
            FetchError: it could not be read.
        """

    @abstractmethod
    def read_range(self, file_name: str, start: int, end: int, size: int, sink: ByteSink) -> None:
        """Read the bytes from `start` to `end`, not included, of a file of `size` bytes.

        Args:
            file_name: the name of the file.
            start: the first byte.
            end: the byte after the last one, greater than `start`.
            size: the size of the file that the manifest states.
            sink: takes the bytes, also those that came before an error; never more than were asked for.

        Raises:
            FetchError: fewer bytes came, or others than those asked for.
        """

    @abstractmethod
    def read_whole(self, file_name: str, size: int, sink: ByteSink) -> None:
        """Read a file from its first byte to its last in one request.

        Raises:
            FetchError: see `read_range`.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End all reads that other threads wait for."""
