"""Which models of a repository stagepack has written."""

from pathlib import Path
from typing import Final

# The first line of every configuration that stagepack writes.
CONFIG_MARKER: Final = b"# Written by stagepack.\n"


def is_written_by_stagepack(folder: Path) -> bool:
    """Whether a folder is a model that stagepack has written."""
    config = folder / "config.pbtxt"
    if not config.is_file():
        return False
    with config.open("rb") as file:
        return file.read(len(CONFIG_MARKER)) == CONFIG_MARKER
