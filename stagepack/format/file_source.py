"""Where the files of a bundle come from, if its folder does not have all of them."""

from collections.abc import Sequence
from typing import Protocol, Self

from stagepack.format.chunks import File


class FileStream(Protocol):
    """A handle of files that are being downloaded. It is used by several threads at a time."""

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes of a file from `start` on, when they have arrived.

        Raises:
            RemoteError: the file cannot be downloaded.
            DigestError: the file differs from the manifest.
            WriteError: the file cannot be written.
        """

    def share(self) -> Self:
        """Return another handle of the same files. When all handles are closed or gone, the download ends."""

    def close(self) -> None:
        """Read no further bytes by this handle."""


class FileSource(Protocol):
    """Brings the files of a bundle into its folder.

    Attributes:
        location: the path or URL that the files come from, for messages.
        url: the URL by which a process of this user on another machine opens the same files, which may have secrets; None if it needs
            options too.
    """

    location: str
    url: str | None

    def fetch(self, entries: Sequence[File]) -> None:
        """Return when the folder has these files.

        Raises:
            RemoteError: a file cannot be downloaded.
            DigestError: a file differs from the manifest.
            WriteError: a file cannot be written.
        """

    def stream(self, entries: Sequence[File]) -> FileStream:
        """Begin to bring files into the folder, in the order in which they are needed, and return at once."""

    def read_signature(self) -> bytes | None:
        """Return the content of the signature file, which the manifest does not list; None if there is none.

        Raises:
            RemoteError: it cannot be downloaded.
            LimitError: it is too large.
        """

    def discard(self, entries: Sequence[File]) -> None:
        """Remove damaged files from the folder, so that `fetch` brings them again."""
