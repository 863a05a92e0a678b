"""Where the files of a bundle come from, if its folder does not have all of them."""

from collections.abc import Sequence
from typing import Protocol

from stagepack.format.manifest import File


class FileSource(Protocol):
    """Brings the files of a bundle into its folder.

    Attributes:
        location: the path or URL that the files come from, for messages.
    """

    location: str

    def fetch(self, entries: Sequence[File]) -> None:
        """Return when the folder has these files.

        Args:
            entries: their manifest entries.

        Raises:
            RemoteError: a file cannot be downloaded.
            DigestError: a file differs from the manifest.
            WriteError: a file cannot be written.
        """

    def discard(self, entries: Sequence[File]) -> None:
        """Remove damaged files from the folder, so that `fetch` brings them again.

        Args:
            entries: their manifest entries.
        """
