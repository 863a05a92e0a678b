"""Where the files of a bundle come from, if its folder does not have all of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from stagepack.errors import Problem
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


class FilePatch(Protocol):
    """Makes a file of a bundle from a file of its folder."""

    @property
    def origin(self) -> File | None:
        """The entry of the file of the folder; None if nothing of the folder is used."""

    def apply(self, start: int, memory: memoryview) -> None:
        """Make bytes of the file from those of the origin, in their place. Several threads call it at a time.

        Args:
            start: the position of the first byte in both files.
            memory: the bytes of the origin, then zeros if it is shorter.

        Raises:
            FormatError: what changes the bytes is damaged.
        """


class FilePatches(Protocol):
    """Makes those files of a bundle that its folder does not have as they are. Nothing is written."""

    @property
    def location(self) -> str:
        """The paths or URLs of what changes the files, for messages."""

    @property
    def base_digest(self) -> str:
        """The digest of the bundle in the folder."""

    @property
    def open_deltas(self) -> Mapping[str, Any]:
        """What changes the files, as it was opened, in order, by digest."""

    @property
    def version(self) -> str:
        """The name that the trainer gave the bundle; empty if it has none."""

    def patch_of(self, file_name: str) -> FilePatch | None:
        """Return how a file is made; None if the folder has it."""

    def since(self, digest: str) -> "FilePatches | None":
        """Return the patches from an earlier bundle of the chain to this bundle.

        Args:
            digest: the digest of the earlier bundle.

        Returns:
            The patches; None if no bundle of the chain has the digest.
        """

    def fetch(self, file_names: Iterable[str]) -> None:
        """Return when what changes these files is on this machine."""

    def damage(self, file_name: str) -> list[Problem]:
        """Return why a file is not what the manifest lists: the problems of what it is made of."""

    def changed_ranges(self, file_name: str) -> list[tuple[int, int]]:
        """Return the bytes of a file that differ from those of the folder, as half-open ranges in ascending order."""
