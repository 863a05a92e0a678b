"""What becomes of the gradients of a model of the zoo: in `stagepack.train`, and in the schedules of `torch.distributed.pipelining`.

Each model is cut in three and takes one step of four microbatches in three processes, with the schedule `ScheduleGPipe`. The loss and all
gradients are held to those of the uncut model, in float64 where torch has its operators so.
"""

import multiprocessing
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.source import capture_source
from stagepack.errors import ExportWarning, StagepackError
from tests.train.batches import (
    MICROBATCHES,
    Reference,
    build_model,
    joined,
    loss_of,
    make_targets,
    microbatches_of,
    precision,
    reference_step,
)
from tests.zoo.case import Case
from tools import pipelining

RIGHT, WRONG, NONE = "right", "wrong", ""
STAGES = 3
# Their draws depend on the order of the microbatches in each stage.
_RANDOM_ROWS = ("operators: random operators",)


# A loss, and gradients by the names of their parameters.
Gradients = tuple[float, list[tuple[str, Any]]]


class TrainingError(Exception):
    """A process could not train; the message is the type of its error."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step of a model.

    Attributes:
        single: the model is in float32.
        model: the model.
        inputs: its example.
        batch: the inputs of the step.
        targets: those of the loss.
        expected: what one process gets.
    """

    single: bool
    model: torch.nn.Module
    inputs: Inputs
    batch: Inputs
    targets: list[torch.Tensor]
    expected: Reference


def our_training(case: Case) -> tuple[str, ...]:
    """What `stagepack.train` gets; nothing for a model that one process does not train."""
    task = find_task(case)
    if task is None:
        return (NONE,)
    with tempfile.TemporaryDirectory() as folder:
        with precision(single=task.single), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ExportWarning)
            bundle = stagepack.export(
                task.model,
                tuple(task.inputs.args),
                task.inputs.kwargs,
                out=Path(folder) / "m.stagepack",
                stages=STAGES,
                dynamic_shapes=task.inputs.dynamic_shapes,
                allow_ops=[case.operators.partition(".")[0]],
            )
        namespaces = {namespace for stage in bundle.stages for namespace in stage.namespaces}

        def train() -> Gradients:
            training = stagepack.train(
                bundle,
                loss_of,
                microbatches=MICROBATCHES,
                schedule="gpipe",
                # As in the reference, and in torch: one microbatch after the other.
                batch_dim=0,
                loss_reduction="mean",
                types=case.classes(),
                allow_ops=sorted(namespaces),
            )
            loss = training.step(*task.batch.args, target=task.targets, **task.batch.kwargs)
            return loss.item(), [
                (weight_name, p.grad) for weight_name, p in training.named_parameters() if p.grad is not None
            ]

        results = _in_processes(train)
    # The gradients of copies are summed already.
    gradients = {weight_name: [gradient] for _, own_gradients in results for weight_name, gradient in own_gradients}
    verdict = _judge(task, results[-1][0], gradients)
    is_warned = any("drops its backward" in str(warning.message) for warning in caught)
    return (f"warned of at the export, {verdict}" if is_warned and verdict == WRONG else verdict,)


def their_training(case: Case) -> tuple[str, ...]:
    """What the stages of `torch.distributed.pipelining.pipeline` get; the gradients of copies of a parameter are summed."""
    task = find_task(case)
    if task is None:
        return (NONE,)
    with precision(single=task.single):
        pipe = pipelining.cut(task.model, task.inputs, pipelining.evenly(STAGES))
    targets = [target.chunk(MICROBATCHES) for target in task.targets]

    def train() -> Gradients:
        number = torch.distributed.get_rank()
        schedule = ScheduleGPipe(
            pipe.build_stage(number, torch.device("cpu")),
            MICROBATCHES,
            loss_fn=lambda result, index: loss_of(result, [parts[index] for parts in targets]),
            args_chunk_spec=_chunks(tuple(task.inputs.args), tuple(task.batch.args)),
            kwargs_chunk_spec=_chunks(dict(task.inputs.kwargs), dict(task.batch.kwargs)),
        )
        losses: list[torch.Tensor] = []
        args, kwargs = ((), {}) if number else (task.batch.args, task.batch.kwargs)
        schedule.step(*args, target=torch.arange(MICROBATCHES), losses=losses, **kwargs)
        loss = torch.stack(losses).mean().item() if losses else 0.0
        parameters = pipe.get_stage_module(number).named_parameters()
        return loss, [(weight_name, p.grad) for weight_name, p in parameters if p.grad is not None]

    results = _in_processes(train)
    gradients: dict[str, list[torch.Tensor]] = {}
    first_names = _first_names(task.model)
    for _, own_gradients in results:
        for copied_name, gradient in own_gradients:
            # A module that is called several times is copied: layer, layer@1, layer@2.
            weight_name = re.sub(r"@\d+", "", copied_name)
            gradients.setdefault(first_names.get(weight_name, weight_name), []).append(gradient)
    return (_judge(task, results[-1][0], gradients),)


def _in_processes(train: Callable[[], Gradients]) -> list[Gradients]:
    """Train in a process for each stage; the first error of any ends all."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(STAGES)]
        processes = [
            context.Process(target=_train_rank, args=(train, rank, folder, sender))
            for rank, (_, sender) in enumerate(pairs)
        ]
        for process, (_, sender) in zip(processes, pairs, strict=True):
            process.start()
            sender.close()
        receivers = {receiver: rank for rank, (receiver, _) in enumerate(pairs)}
        results: dict[int, Gradients] = {}
        try:
            while len(results) < STAGES:
                for receiver in wait([receiver for receiver, rank in receivers.items() if rank not in results]):
                    assert isinstance(receiver, Connection)
                    answer = receiver.recv()
                    if isinstance(answer, Exception):
                        raise answer
                    results[receivers[receiver]] = answer
        finally:
            for process in processes:
                process.kill()
                process.join()
    loss_and_arrays = [results[rank] for rank in range(STAGES)]
    return [
        (loss, [(weight_name, torch.from_numpy(array)) for weight_name, array in arrays])
        for loss, arrays in loss_and_arrays
    ]


def _train_rank(train: Callable[[], Gradients], rank: int, folder: str, sender: Connection) -> None:
    """Send the loss and the gradients of one process, or its error."""
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
        loss, gradients = train()
        arrays = [
            (
                weight_name,
                gradient.detach()
                .to(torch.complex128 if gradient.is_complex() else torch.float64)
                .resolve_conj()
                .numpy(),
            )
            for weight_name, gradient in gradients
        ]
        sender.send((loss, arrays))
        torch.distributed.barrier()
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        sender.send(TrainingError(type(error).__name__))


def find_task(case: Case) -> Task | None:
    """A step of a model in the higher precision in which it is captured and trained in one process; None if it is not."""
    if case.row in _RANDOM_ROWS:
        return None
    for single in (False, True):
        try:
            with precision(single=single):
                model, inputs = build_model(case, single=single)
                capture_source(model, inputs)
                microbatches = microbatches_of(inputs)
                reference_model, _ = build_model(case, single=single)
                targets = make_targets(reference_model, microbatches)
                expected = reference_step(reference_model, microbatches, targets)
        except (StagepackError, RuntimeError, ValueError, AttributeError, AssertionError, StopIteration):
            continue
        batch = joined(microbatches)
        if expected.gradients and expected.loss.isfinite():
            return Task(single=single, model=model, inputs=inputs, batch=batch, targets=targets, expected=expected)
    return None


def _chunks(examples: Any, values: Any) -> Any:
    """How the schedule cuts arguments: those are cut that are larger than in the example."""
    return pytree.tree_map(
        lambda example, value: (
            TensorChunkSpec(0)
            if isinstance(value, torch.Tensor) and value.dim() and len(value) != len(example)
            else _Replicate()
        ),
        examples,
        values,
    )


def _first_names(model: torch.nn.Module) -> Mapping[str, str]:
    """The first name of each parameter by all of its names."""
    first_names: dict[int, str] = {}
    return {
        weight_name: first_names.setdefault(id(parameter), weight_name)
        for weight_name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _judge(task: Task, loss: float, gradients: Mapping[str, Sequence[torch.Tensor]]) -> str:
    tolerance = 1e-5 if task.single else 1e-12
    expected = task.expected.gradients
    largest = max(gradient.abs().max().item() for gradient in expected.values() if gradient.numel())
    expected_loss = task.expected.loss.item()
    is_right = abs(loss - expected_loss) <= tolerance * abs(expected_loss)
    for weight_name in {*expected, *gradients}:
        total = sum(gradients.get(weight_name, ()), torch.zeros(()))
        wanted = expected.get(weight_name, torch.zeros(()))
        if total.numel() and wanted.numel():
            # A gradient that is zero but for rounding is no exacter than others.
            scale = max(wanted.abs().max().item(), 1e-3 * largest)
            is_right &= (total - wanted).abs().max().item() <= tolerance * scale
    return RIGHT if is_right else WRONG


def training_table(case_names: Iterable[str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """The lines of a page on the models that one process trains."""
    trained = [case_name for case_name in case_names if ours.get(case_name, NONE) != NONE]
    yield from ("", "## Training", "")
    yield (
        f"One step of {MICROBATCHES} microbatches of the models that one process trains, cut in {STAGES}: the loss and all gradients, "
        "held to those of the uncut model in float64 (1e-12 of the largest number of each gradient; float32 and 1e-5 where torch lacks "
        "operators in float64). **stagepack** is `stagepack.train`, **pipelining** the stages of "
        "`torch.distributed.pipelining.pipeline`, both under `ScheduleGPipe` in three processes. Where pipelining has copies of a "
        "parameter, their gradients are summed for it. Models that draw random numbers are not among them. "
        "`tests/train/test_architectures.py` runs other schedules, in 2 and 4 processes."
    )
    yield ""
    right_ours, right_theirs = (sum(side.get(case_name) == RIGHT for case_name in trained) for side in (ours, theirs))
    wrong = sum(theirs.get(case_name) == WRONG for case_name in trained)
    yield f"{len(trained)} models: stagepack right {right_ours}, pipelining right {right_theirs}, wrong without a word {wrong}."
    yield from ("", "| model | stagepack | pipelining |", "|---|---|---|")
    yield from (f"| `{case_name}` | {ours[case_name]} | {theirs.get(case_name, NONE)} |" for case_name in trained)
