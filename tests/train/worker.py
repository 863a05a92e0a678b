"""What each process of a test does: ``worker.py TASK ARGUMENT ...``, by the table `TASKS`.

A run is ``MODEL:STAGES:SCHEDULE:MICROBATCHES``, of a bundle ``MODEL-STAGES.stagepack`` of the folder.
"""

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, and not in its type hints
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import stagepack
from stagepack.errors import InputError, OptionError, StageLostError, StagepackError
from stagepack_train import process_watch, start, torch_meeting
from stagepack_train.training import Training
from tests.train.batches import MICROBATCHES, loss_of, new_optimizer, read_batch
from tests.train.models import (
    BRANCH_LOSSES,
    BRANCHES,
    GRADIENT_STEPS,
    LEARNING_RATE,
    MAX_NORM,
    MODELS,
    SEED,
    SEQUENCES,
    STEPS,
    TIED,
    assert_gradients,
    assert_step,
    cut,
)
from tests.train.written_weights import refuse_deltas, ship_steps, write_on_a_full_disk

KILL_STEP = 7
CHECKPOINT_STEPS = 3
GRADIENT_TOLERANCE = (1e-10, 1e-14)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
}
# The functions of `stagepack.train`, where they are looked up, at whose first call a process is lost.
MOMENTS: dict[str, Any] = {
    "open_for_loading": start,
    "own_identity": torch_meeting,
    "open_store": torch_meeting,
    "check_identities": torch_meeting,
    "ProcessGroup": torch_meeting,
    "reachable_address": torch_meeting,
    "StageFacts": torch_meeting,
    "ProcessWatch": start,
    "prepare_placed": start,
    "finish_prepared": start,
    "Training": start,
    "step": None,
}


def open_run(folder: Path, run: str, **options: Any) -> Training:
    """Begin the training of a run."""
    model_name, stage_count, schedule, microbatches = run.split(":")
    bundle = folder / f"{model_name}-{stage_count}.stagepack"
    loss = MODELS[model_name].loss
    return stagepack.train(bundle, loss, microbatches=int(microbatches), schedule=schedule, **options)


def write_gradients(folder_name: str, *runs: str) -> None:
    """Write the losses of some steps of each run, the sum of their gradients and its norm, and save the bundle.

    With four processes and two stages, two pipelines train with a half of the batch each.
    """
    folder = Path(folder_name)
    for run in runs:
        model_name, stage_count, _, microbatches = run.split(":")
        process_count = int(os.environ["WORLD_SIZE"])
        replicas = 2 if process_count == 2 * int(stage_count) else 1
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) if replicas == 2 else None
        replica = 0 if mesh is None else mesh.get_local_rank("dp")
        training = open_run(folder, run, seed=SEED, mesh=mesh)
        random_state = torch.get_rng_state()
        losses = []
        for step in range(GRADIENT_STEPS):
            args, target = cut(MODELS[model_name].batch(step, replicas * int(microbatches)), replicas)[replica]
            losses.append(training.step(*args, target=target))
        assert torch.equal(random_state, torch.get_rng_state())
        gradients = {name: p.grad for name, p in training.named_parameters() if p.grad is not None}
        norm = training.clip_gradients(1e9)
        save_file(gradients | {"losses": torch.stack(losses), "norm": norm}, folder / f"{run}-{training.rank}.tensors")
        stagepack.save(training, out=folder / f"{run}.stagepack")
        training.close()


def train_steps(folder_name: str, run: str) -> None:
    """Train some steps, and write losses, weights and the bundle."""
    folder = Path(folder_name)
    training = open_run(folder, run)
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    losses = []
    for number in range(STEPS):
        args, target = TIED.batch(number, 8)
        losses.append(training.step(*args, target=target))
        training.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    save_file({"losses": torch.stack(losses)}, folder / f"losses-{training.rank}.safetensors")
    save_file(dict(training.own_weights()), folder / f"weights-{training.rank}.safetensors")
    assert stagepack.save(training, out=folder / "trained.stagepack").digest
    training.close()


def make_mistakes(folder_name: str, run: str) -> None:
    """Do what users do by mistake."""
    training = open_run(Path(folder_name), run)
    give_different_batches(training)
    full = Path(folder_name) / "full"
    write_on_a_full_disk(training, full, lambda: stagepack.save(training, out=full / "m.stagepack"))
    freeze_one_copy(training)
    training.close()


def give_different_batches(training: Training) -> None:
    """Step as with samplers of different seeds: all but the process of the last stage say so."""
    (ids, *further_args), target = TIED.batch(0, 8)
    message = "expected the same batch in all processes of a pipeline, found another one in process 0 than in process 1"
    with contextlib.nullcontext() if training.rank else pytest.raises(InputError, match=message):
        training.step(ids if training.rank else ids.flip(0), *further_args, target=target)


def write_deltas(folder_name: str, run: str) -> None:
    """Ship steps as deltas, and ask for some that cannot be."""
    folder, [model_name, _, schedule, microbatches] = Path(folder_name), run.split(":")
    bundle, loss = folder / "own.stagepack", MODELS[model_name].loss
    training = stagepack.train(bundle, loss, microbatches=int(microbatches), schedule=schedule)
    ship_steps(folder, training, model_name)
    refuse_deltas(folder, training, model_name)
    training.close()


def freeze_one_copy(training: Training) -> None:
    """Freeze a shared parameter in one process, then in both."""
    args, target = TIED.batch(0, 8)
    for frozen_rank, message in ((0, "embedding.weight (is frozen|requires gradients) in process"), (1, "")):
        if training.rank == frozen_rank:
            dict(training.named_parameters())["embedding.weight"].requires_grad_(False)
        with pytest.raises(OptionError, match=message) if message else contextlib.nullcontext():
            training.step(*args, target=target)


def compare_branches(folder_name: str, *runs: str) -> None:
    """Take steps of two models, beside the same steps in one process: each run ends with ``:OPTIMIZER``."""
    for run_and_optimizer in runs:
        run, _, optimizer_name = run_and_optimizer.rpartition(":")
        training, model = open_run(Path(folder_name), f"branches:{run}"), BRANCHES.new()
        optimizers = [OPTIMIZERS[optimizer_name](list(owner.parameters())) for owner in (training, model)]
        for number in range(len(BRANCH_LOSSES)):
            assert_step(training, model, BRANCHES.loss, BRANCHES.batch(number, 8), (1e-12, 0), GRADIENT_TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
            compare_parameters(training, model)
            if number % 2:  # else gradients are added to
                for optimizer in optimizers:
                    optimizer.zero_grad()
        training.close()
        training = open_run(Path(folder_name), f"sequences:{run}", loss_reduction="sum")
        model = SEQUENCES.new()
        assert_step(training, model, SEQUENCES.loss, SEQUENCES.batch(0, 8), (1e-12, 0), GRADIENT_TOLERANCE)
        compare_parameters(training, model)
        training.close()
        refuse_a_mean_of_means(Path(folder_name), run)


def compare_parameters(training: Training, model: torch.nn.Module) -> None:
    """Assert that parameters and their gradients are those of one process."""
    expected_parameters = dict(model.named_parameters())
    for name, parameter in training.named_parameters():
        torch.testing.assert_close(parameter, expected_parameters[name], rtol=1e-10, atol=1e-12)
    assert_gradients(training, model, GRADIENT_TOLERANCE)


def refuse_a_mean_of_means(folder: Path, run: str) -> None:
    """Assert that all processes refuse the mean loss of the labels of each microbatch, which have different numbers of them."""

    def loss(logits: Any, target: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target["labels"].flatten())

    stage_count, schedule, microbatches = run.split(":")
    bundle = folder / f"sequences-{stage_count}.stagepack"
    training = stagepack.train(bundle, loss, microbatches=int(microbatches), schedule=schedule)
    args, target = SEQUENCES.batch(0, 8)
    with pytest.raises(OptionError, match="the loss of a batch is not the mean of those of its microbatches"):
        training.step(*args, target=target)
    training.close()


def train_architecture(folder_name: str, operators: str, *runs: str) -> None:
    """Train a model of the zoo, and write the losses and gradients of the first step.

    A run ``BUNDLE:SCHEDULE`` has one step on ``batch-0.safetensors``; ``BUNDLE:SCHEDULE:steps`` has as many as there are batches, with
    an optimizer, and writes the weights after the last one, and the bundle.
    """
    folder = Path(folder_name)
    if operators:
        importlib.import_module(operators)
    for run in runs:
        bundle_name, schedule, *has_steps = run.split(":")
        bundle = stagepack.open(folder / f"{bundle_name}.stagepack")
        # Rows of some models meet, such as in a mixture of experts: the reference works on one microbatch after the other too.
        training = stagepack.train(
            bundle,
            loss_of,
            microbatches=MICROBATCHES,
            schedule=schedule,
            batch_dim=0,
            loss_reduction="mean",
            allow_ops=sorted({namespace for stage in bundle.stages for namespace in stage.namespaces}),
        )
        # torch refuses an optimizer of no parameters, which a stage may have.
        optimizer = new_optimizer(training.parameters()) if has_steps else None
        losses: list[torch.Tensor] = []
        gradients: dict[str, torch.Tensor] = {}
        batch_paths = sorted(folder.glob("batch-*.safetensors"))
        for batch_path in batch_paths if has_steps else batch_paths[:1]:
            batch = read_batch(batch_path)
            losses.append(training.step(*batch.args, target=batch.targets, **batch.kwargs))
            gradients = gradients or {
                name: p.grad.clone(memory_format=torch.contiguous_format)
                for name, p in training.named_parameters()
                if p.grad is not None
            }
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        result_path = folder / f"{bundle_name}-{schedule}-{training.rank}.safetensors"
        save_file(gradients | {"losses": torch.stack(losses)}, result_path)
        if has_steps:
            weights = {name: tensor.contiguous() for name, tensor in training.own_weights()}
            save_file(weights, folder / f"weights-{training.rank}.safetensors")
            stagepack.save(training, out=folder / f"{bundle_name}-trained.stagepack")


def resume(bundle: str, schedule: str, folder_name: str, kill_rank: str) -> None:
    """Train with checkpoints, from the last one on; a process is killed by a signal in the first run."""
    folder = Path(folder_name)
    training = stagepack.train(bundle, TIED.loss, microbatches=4, schedule=schedule)
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    checkpoints = sorted(path.parent for path in folder.glob("*/.metadata"))
    if checkpoints:
        state = training.state_dict(optimizer)
        load(state, checkpoint_id=checkpoints[-1])
        training.load_state_dict(state, optimizer)
    is_first_run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while training.steps < STEPS:
        number = training.steps
        args, target = TIED.batch(number, 8)
        if number == KILL_STEP and training.rank == int(kill_rank) and is_first_run:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = training.step(*args, target=target)
        if not training.rank:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{number} {loss.item()!r}\n")
        training.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if training.steps % CHECKPOINT_STEPS == 0:
            save(training.state_dict(optimizer), checkpoint_id=folder / str(training.steps))
    torch.distributed.destroy_process_group()


def lose_while_training(bundle: str, pause: str, telling_seconds: str) -> None:
    """Step until another process is lost; print when, and what the error says. Process 0 takes some time to tell the others."""
    start_thread = process_watch._start

    def start_late(function: Callable[..., None], *arguments: object) -> threading.Thread:
        time.sleep(float(telling_seconds) * (function is process_watch._send_quietly))
        return start_thread(function, *arguments)

    pytest.MonkeyPatch().setattr(process_watch, "_start", start_late)
    torch.distributed.init_process_group("gloo")
    training = stagepack.train(bundle, TIED.loss, microbatches=4, schedule="1f1b", silence_seconds=3.0)
    args, target = TIED.batch(0, 8)
    try:
        while True:
            training.step(*args, target=target)
            tell("stepped")
            time.sleep(float(pause))
    except StageLostError as error:
        tell(f"LOST {error}")
    if os.environ["RANK"] != "0":
        time.sleep(30)  # a process that does not end must not keep the others from noticing


def lose_while_starting(bundle: str, lost_rank: str, moment: str, has_group: str) -> None:
    """Start to train; print what the error says. The process of the rank ends at the moment, as if it were killed."""
    is_lost = os.environ["RANK"] == lost_rank
    if has_group == "True":
        torch.distributed.init_process_group("gloo")
        wait_for_others(is_lost)
    if is_lost and MOMENTS[moment] is not None:
        setattr(MOMENTS[moment], moment, end)
    try:
        training = stagepack.train(bundle, TIED.loss, microbatches=4, schedule="gpipe", silence_seconds=3.0)
        if is_lost:
            end()
        args, target = TIED.batch(0, 8)
        while True:
            training.step(*args, target=target)
    except StageLostError as error:
        tell(f"LOST {error}")
    except StagepackError as error:
        tell(f"OTHER {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - what the test looks for
        tell(f"RAW {type(error).__name__}: {error}")
    time.sleep(30)  # a process that does not end must not keep the others from noticing


def wait_for_others(is_lost: bool) -> None:
    """Let the process that is lost go on when all others have a group: one that is lost before is an error of torch."""
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store.set(f"has a group/{rank}", "")
    if is_lost:
        store.wait([f"has a group/{other}" for other in range(size)])


def end(*_: object, **__: object) -> Any:
    """End without a word."""
    os._exit(1)


def tell(text: str) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def measure_memory(bundle: str, recompute: Any) -> None:
    """Write the largest memory that a step of `LayerModel` takes, in bytes."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = stagepack.train(
        bundle,
        torch.nn.functional.mse_loss,
        microbatches=1,
        schedule="looped-bfs",
        recompute=None if recompute == "none" else recompute,
    )
    x = torch.randn(2**12, 256, dtype=torch.float64)
    training.step(x, target=x)
    # Not ru_maxrss, which begins with that of the process that started this one.
    [peak_kib] = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    tell(str(int(peak_kib) * 1024))


TASKS: dict[str, Callable[..., None]] = {
    "gradients": write_gradients,
    "steps": train_steps,
    "mistakes": make_mistakes,
    "deltas": write_deltas,
    "branches": compare_branches,
    "architecture": train_architecture,
    "resume": resume,
    "lose": lose_while_training,
    "lose-start": lose_while_starting,
    "memory": measure_memory,
}
# In a group that is there before, and destroyed afterwards.
_WITH_OWN_GROUP = ("steps", "mistakes", "deltas", "branches", "architecture")


def main() -> None:
    """Do a task."""
    task, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    if task in _WITH_OWN_GROUP:
        torch.distributed.init_process_group("gloo")
    TASKS[task](*arguments)
    if task in _WITH_OWN_GROUP:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
