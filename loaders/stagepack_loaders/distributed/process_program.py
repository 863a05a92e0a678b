"""The program of a process that a launcher starts: ``python -m stagepack_loaders.distributed.process_program DESCRIPTION``."""

import importlib
import json
import sys

import msgspec
from msgspec import Struct
from torch.distributed import DistError

from stagepack.errors import StagepackError
from stagepack.opening import open_bundle
from stagepack_loaders.distributed.membership import GroupOptions, tell_start_error
from stagepack_loaders.distributed.process_group import open_store
from stagepack_loaders.distributed.stage_worker import LOST_STATUS, end_with_parent, run_stage_process


class ProcessDescription(Struct, frozen=True, kw_only=True):
    """What a process is told when it is started.

    Attributes:
        bundle: the folder of the bundle.
        imports: the modules to import first.
        rank: its number.
        size: the number of processes.
        host: the address of the store of the group.
        port: its port.
        options: how the pipeline is distributed.
        digest: the digest that the bundle must have, if it is a URL.
        parent: the process that has started it on this machine, with which it ends; 0 if there is none.
    """

    bundle: str
    imports: tuple[str, ...]
    rank: int
    size: int
    host: str
    port: int
    options: GroupOptions
    digest: str | None = None
    parent: int = 0


def decode_description(content: str) -> ProcessDescription:
    """Return what `encode_description` has encoded."""
    return msgspec.convert(json.loads(content), ProcessDescription)


def encode_description(description: ProcessDescription) -> str:
    """Return a description as an argument of the program. Paths may have bytes that are not UTF-8, which only Python's json encodes."""
    return json.dumps(msgspec.to_builtins(description))


def run_process(description: ProcessDescription) -> None:
    """Run the stages of one process. The front reports errors of all processes; this one only ends."""
    if description.parent:
        end_with_parent(description.parent)
    try:
        store = open_store(description.host, description.port)
    except DistError:  # the front has gone
        sys.exit(LOST_STATUS)
    try:
        for module_name in description.imports:
            importlib.import_module(module_name)
        bundle = open_bundle(description.bundle, digest=description.digest)
    except Exception as error:  # noqa: BLE001 - an imported module raises anything
        tell_start_error(store, description.rank, error)
        sys.exit(LOST_STATUS)
    try:
        run_stage_process(bundle, store, description.rank, description.size, description.options)
    except (StagepackError, DistError):  # told by all processes, or the front has gone
        sys.exit(LOST_STATUS)
    except Exception as error:
        tell_start_error(store, description.rank, error)
        raise


if __name__ == "__main__":
    run_process(decode_description(sys.argv[1]))
