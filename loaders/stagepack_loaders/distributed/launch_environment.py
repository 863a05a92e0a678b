"""The environment variables by which torchrun tells a process which one of several it is. Imports no torch."""

import contextlib
import json
import os
import time
from pathlib import Path

from stagepack.errors import OptionError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def has_launcher() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return all(variable in os.environ for variable in _VARIABLES)


def is_launched_group() -> bool:
    """Whether a launcher has started this process as one of several."""
    return has_launcher() and launched_size() > 1


def launched_rank() -> int:
    """The number of this process among those that the launcher has started."""
    return _integer("RANK", 0, launched_size() - 1)


def launched_size() -> int:
    """How many processes the launcher has started, on all machines."""
    return _integer("WORLD_SIZE", 1, 2**31 - 1)


def local_place() -> tuple[int, int]:
    """The number of this process among those of its machine, and how many these are; alone where the launcher does not say."""
    size = _integer("LOCAL_WORLD_SIZE", 1, 2**31 - 1, "1")
    return _integer("LOCAL_RANK", 0, size - 1, "0"), size


def launched_address() -> str:
    """The name or address of the machine of process 0."""
    return os.environ["MASTER_ADDR"]


def launched_port() -> int:
    """The port of the store of the group, on the machine of process 0."""
    return _integer("MASTER_PORT", 1, 2**16 - 1)


def has_store_of_launcher() -> bool:
    """Whether the launcher itself has opened the store of the group; otherwise process 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_torchrun() -> bool:
    """Whether the launcher is torchrun, which stays the parent of the processes."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restart_count() -> int:
    """How often the launcher has started the processes again."""
    return _integer("TORCHELASTIC_RESTART_COUNT", 0, 2**31 - 1, "0")


def write_error_file(message: str) -> None:
    """Write why this process fails for torchrun, which prints it at the end of its own report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}  # the fields that torchrun reads
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")


def _integer(variable: str, lowest: int, highest: int, default: str = "") -> int:
    """The number in an environment variable."""
    text = os.environ.get(variable, default)
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise OptionError(
            f"the environment variable {variable}, which a launcher such as torchrun sets: expected an integer from {lowest} to {highest}, "
            f"found {text[:80]!r}"
        )
    return int(text)
