"""Bundles and deltas that the processes of a training write together."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import CaptureError, GroupError, OutputExistsError, UnchangedError, WriteError
from stagepack_train.training import Training
from tests.train.models import LEARNING_RATE, MODELS

DELTA_STEPS = 2


def ship_steps(folder: Path, training: Training, model_name: str) -> None:
    """Write each step as a delta on the bundle that is trained, and on the same model in another cut; save the bundle at last."""
    optimizer = torch.optim.AdamW(list(training.parameters()), lr=LEARNING_RATE)
    deltas: dict[str, list[stagepack.Delta]] = {"own": [], "other": []}
    for number in range(DELTA_STEPS):
        args, target = MODELS[model_name].batch(number, 8)
        training.step(*args, target=target)
        optimizer.step()
        optimizer.zero_grad()
        for cut, chain in deltas.items():
            base = stagepack.open(folder / f"{cut}.stagepack", deltas=chain)
            delta = stagepack.delta(base, training, out=folder / f"{cut}-{number}.delta", version=f"step {number}")
            assert delta.version == f"step {number}"
            chain.append(delta)
        stagepack.save(training, out=folder / f"{number}.stagepack")


def refuse_deltas(folder: Path, training: Training, model_name: str) -> None:
    """Ask for deltas that cannot be: all processes say so, and nothing is left."""
    own, own_delta = folder / "own.stagepack", folder / "own-0.delta"
    composed = stagepack.open(own, deltas=[own_delta, folder / "own-1.delta"])
    names = sorted(path.name for path in folder.iterdir())
    cases: tuple[tuple[object, str, type[Exception], str], ...] = (
        (own, "own-0.delta", OutputExistsError, "already exists"),
        (composed, "same.delta", UnchangedError, "there is nothing to write"),
        (folder / "wide.stagepack", "wide.delta", CaptureError, "does not fit the graph"),
    )
    for base, out, error, message in cases:
        # Process 0 finds it, and the others are told.
        is_told = bool(training.rank) and error is not UnchangedError
        told = (GroupError, f"process 0 could not .*{message}") if is_told else (error, message)
        with pytest.raises(told[0], match=told[1]):
            stagepack.delta(base, training, out=folder / out)  # type: ignore[arg-type] # all are bundles
    write_on_a_full_disk(training, folder, lambda: stagepack.delta(own, training, out=folder / "full.delta"))
    assert training.rank or sorted(path.name for path in folder.iterdir()) == names


def write_on_a_full_disk(training: Training, folder: Path, write: Callable[[], object]) -> None:
    """Write where one process cannot: each says so, and nothing is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    error_class, message = (
        (WriteError, "cannot be written") if training.rank else (GroupError, "process 1 could not save")
    )
    names = sorted(path.name for path in folder.iterdir())
    try:
        with pytest.raises(error_class, match=message):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    assert training.rank or sorted(path.name for path in folder.iterdir()) == names
