"""A record of the graphs whose values were compared with what their operators return (SPEC G16).

That comparison imports parts of torch that a load needs for nothing else, for a second. It is made once for each content of a graph file,
which each load compares with its digest, and for the versions that its outcome depends on.
"""

from typing import Final

import torch
from blake3 import blake3

import stagepack
from stagepack.format.manifest import File
from stagepack_loaders.verification_record import VerificationRecord

# The folder of the record; empty to keep none.
FOLDER_VARIABLE: Final = "STAGEPACK_CHECKED_GRAPHS"


class CheckedGraphs(VerificationRecord):
    """The record of this user."""

    def __init__(self) -> None:
        """Find the record. Without one, no graph counts as checked."""
        super().__init__(FOLDER_VARIABLE, "checked")

    def identity(self, entry: File) -> str:
        """Return the name of the entry of a graph file.

        Args:
            entry: its manifest entry; the content has just been compared with the digest.
        """
        versions = (stagepack.__version__, torch.__version__, torch.get_default_dtype())
        return blake3(repr((entry.size, entry.blake3, *versions)).encode()).hexdigest()
