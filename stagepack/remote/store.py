"""Where the files of a remote bundle are read from, and how a read fails."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# Takes the bytes of a file as they come, in order.
ByteSink = Callable[[bytes], Any]


class FetchError(Exception):
    """A read failed; another try may succeed, after the seconds that the server asks to wait, if it says so."""

    def __init__(self, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class PermanentFetchError(FetchError):
    """A read failed, and so would another try."""


class MissingFileError(PermanentFetchError):
    """The store has no such file."""


class WrongSizeError(PermanentFetchError):
    """The file has another size than the manifest states."""


class RangesIgnoredError(PermanentFetchError):
    """The server answers a request for a range with the whole file."""


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
        """Read the bytes from `start` to `end`, not included, of a file of which the manifest states `size` bytes.

        The sink takes the bytes, also those that came before an error; never more than were asked for.

        Raises:
            FetchError: fewer bytes came, or others than those asked for.
        """

    @abstractmethod
    def read_whole(self, file_name: str, size: int, sink: ByteSink) -> None:
        """Read a file from its first byte to its last, in one request where that is possible; see `read_range`."""

    @abstractmethod
    def cancel(self) -> None:
        """End all reads that other threads wait for."""
