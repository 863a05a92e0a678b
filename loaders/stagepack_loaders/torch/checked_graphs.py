"""A record of the graphs whose values were compared with what their operators return (SPEC G16).

That comparison imports parts of torch that a load needs for nothing else, for half a second. It is made once for each content of a graph
file, which each load compares with its digest, and for all else that its outcome depends on: the version of torch, the default dtype, and
the code of the comparison.
"""

from functools import cache
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from stagepack.format.manifest import File
from stagepack_loaders.verified_files import VerificationRecord

# The folder of the record; empty to keep none.
FOLDER_VARIABLE: Final = "STAGEPACK_CHECKED_GRAPHS"


class CheckedGraphs(VerificationRecord):
    """The record of this user."""

    def __init__(self) -> None:
        super().__init__(FOLDER_VARIABLE, "checked")

    def identity(self, entry: File) -> str:
        """Return the name of the entry of a graph file."""
        conditions = (torch.__version__, torch.get_default_dtype(), _code_digest())
        return blake3(repr((entry.size, entry.blake3, *conditions)).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """The digest of the code that calls operators of torch: another check of the same version of stagepack has other entries."""
    content = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return blake3(content).hexdigest()
