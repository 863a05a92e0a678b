"""The weights of a bundle in several processes, of which each holds a part."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed
from safetensors import SafetensorError
from safetensors.torch import save_file

from stagepack.errors import GroupError, WriteError
from stagepack.format.reader import Bundle


class DistributedWeights(Protocol):
    """The weights of a bundle in several processes, of which each holds a part; `stagepack.train` returns such."""

    bundle: Bundle
    allow_ops: tuple[str, ...]
    rank: int
    process_count: int
    group: torch.distributed.ProcessGroup | None

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that this process saves; all processes together save each once."""

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for what waits for the other processes, which names one that is lost."""


def in_all_processes(training: DistributedWeights, action: Callable[[], str]) -> list[str]:
    """Do something in all processes at the same time; return what it returned, by process."""
    result = ""
    error: Exception | None = None
    try:
        result = action()
    except (OSError, SafetensorError) as own_error:
        error = WriteError(f"cannot be written: {own_error}")
    except Exception as own_error:  # noqa: BLE001 - the other processes wait for this one, whatever it is
        error = own_error
    outcomes: list[tuple[str, str | None]] = [("", None)] * training.process_count
    with training.guarded():
        torch.distributed.all_gather_object(outcomes, (result, None if error is None else str(error)), training.group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise GroupError(f"process {rank} could not save its part: {message}")
    return [own_result for own_result, _ in outcomes]


def weight_names(bundle: Bundle) -> set[str]:
    """Return the names of the weights of the selected entry point."""
    return {
        weight_name
        for stage_number in range(len(bundle.stages))
        for weight in bundle.graph(stage_number).weights
        for weight_name in weight.names
    }


def write_weights(named_weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write weights into a file of safetensors."""
    weights: dict[str, torch.Tensor] = {}
    known_storages: set[int] = set()
    for weight_name, tensor in named_weights:
        # The file has each tensor by itself: one whose memory another one has is copied.
        storage = tensor.untyped_storage().data_ptr()
        weights[weight_name] = tensor.clone() if storage in known_storages else tensor.contiguous()
        known_storages.add(storage)
    save_file(weights, path)
