"""Load the stages of one process for training."""

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_backend_config

from stagepack.errors import EvaluationModeWarning, MicrobatchWarning, OptionError, UnsupportedError, warn_caller
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path
from stagepack.opening import errors_name_bundle
from stagepack.partition.joined_bundle import join_bundle
from stagepack_loaders.base import Loading
from stagepack_loaders.distributed.routes import stages_of_rank
from stagepack_loaders.options import LoadOptions, Verify
from stagepack_loaders.placement import place_stages
from stagepack_loaders.preparation import finish_prepared, open_for_loading, prepare_placed
from stagepack_loaders.registry import TORCH_RUNTIME, find_runtime
from stagepack_loaders.torch.stage import TorchStage
from stagepack_train.boundaries import evaluation_scopes
from stagepack_train.microbatches import BatchDimensions, find_batch_dimensions
from stagepack_train.process_watch import ProcessWatch
from stagepack_train.replicas import TrainingGroups, groups_of_mesh
from stagepack_train.schedules import SCHEDULES, check_microbatches, place_stages_for, runs_one_stage, splits_backward
from stagepack_train.torch_meeting import make_default_group, meet_processes
from stagepack_train.training import Training
from stagepack_train.training_options import Loss, Recompute, Reduction, TrainingOptions


@errors_name_bundle
def train(
    bundle: str | os.PathLike[str] | Bundle,
    loss: Loss,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    batch_dim: int | str | None = None,
    loss_reduction: Reduction | None = None,
    device: Any = "cpu",
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    modules: bool = False,
    recompute: Recompute = None,
    seed: int = 0,
    silence_seconds: float = 8.0,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    stages_per_process: Sequence[int] = (),
) -> Training:
    """Load the stages of this process for training. Each process that ``torchrun`` has started calls this with the same arguments.

    Without torchrun, and without a process group, one process trains all stages, in a schedule for several stages in each process.

    The processes exchange activations and gradients by torch.distributed; the default process group is made if there is none. Captured
    graphs do what the model did at export: dropout and batch norm of a model that was exported in evaluation mode stay so.

    Args:
        bundle: the folder of the bundle, or an opened bundle.
        loss: returns the loss of a microbatch, given the result of the model, in its containers, and the target. It runs in the process
            of the last stage. See `loss_reduction`.
        microbatches: the number of microbatches of equal size that a batch is cut into.
        schedule: the order in which stages work on microbatches: ``gpipe`` or ``1f1b`` for one stage in each process; ``looped-bfs``,
            ``interleaved-1f1b``, ``interleaved-zero-bubble`` or ``zbv-zero-bubble`` for several.
        batch_dim: the dimension that is cut into microbatches: its name in `dynamic_shapes` of the export, or its number in the first
            tensor among the inputs. None for the first dimension along which the graphs keep rows apart.
        loss_reduction: how the losses of microbatches give the loss of the batch: their ``"mean"`` or their ``"sum"``. None for the mean,
            where it is the loss of one process: each step computes the loss of every two microbatches in a row together too, without
            gradients, and refuses a loss that differs. With one of the words, the loss of a batch is so by definition, and `loss` is
            called once for each microbatch.
        device: the device of this process.
        types: as for `stagepack.load`.
        allow_ops: as for `stagepack.load`.
        verify: as for `stagepack.load`.
        group: the processes of the pipeline; None for all.
        mesh: instead of `group`, processes in the dimensions ``pp``, the pipeline, and ``dp``, the number of pipelines. Each pipeline
            has batches of its own; gradients are averaged over all before a step returns.
        modules: run by calls of the model's modules, as in `stagepack.load_stage`, so that they can be replaced, such as by others with
            adapters. Make the optimizer after that. There are no regions to recompute then.
        recompute: what is computed again in the backward pass, so that its activations need no memory meanwhile (activation
            checkpointing, by `torch.utils.checkpoint`): ``"regions"``, the repeated layers of a stage, or ``"stages"``. Those that
            write buffers or their inputs, such as batch norms in training mode, are left out. Not with the schedules that split the
            backward pass.
        seed: the seed of random numbers, such as those of dropout. Microbatch ``i`` of step ``s``, both counted from 0, draws those that
            the model draws in one process after ``torch.manual_seed(seed + s * microbatches + i)``, on devices of the same kind. The
            pipelines of a mesh count their microbatches one after the other.
        silence_seconds: a process that shows no sign of life for so long is lost, in seconds. One that is killed is noticed at once.
        out: where `stagepack.save` will write the trained bundle: what would refuse it then, is refused now.
        overwrite: `stagepack.save` may replace a bundle that exists at `out`.
        stages_per_process: the numbers of consecutive stages that are joined into one for each process, such as ``[4, 3, 1]``. Without
            it, ``gpipe`` and ``1f1b`` join the stages of a bundle that has more than there are processes, so that the slowest process is
            as fast as possible.

    Raises:
        OutputExistsError, WriteError: nothing can be written to `out`; see `stagepack.export`.
        OptionError: there is no such schedule, or it does not fit the numbers of stages, processes or microbatches; or a value depends on
            data, or on the result of an earlier call.
        UnsupportedError: torch is older than 2.13, whose schedules need a gradient for each value.
        GroupError: the processes have different bundles or versions, or cannot connect.
        StageLostError: another process is gone.
        StagepackError: the stages cannot be loaded; see `stagepack.load`.

    Examples:
        >>> training = stagepack.train("m.stagepack", torch.nn.functional.cross_entropy, microbatches=8)
        >>> optimizer = torch.optim.AdamW(training.parameters(), lr=1e-4)
        >>> for images, labels in batches:
        ...     loss = training.step(images, target=labels)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    _check_torch()
    opened_bundle = open_for_loading(bundle, verify)
    if out is not None:
        check_output_path(out, overwrite=overwrite)
    _check_words(schedule, recompute, loss_reduction)
    if not torch.distributed.is_initialized():
        make_default_group()
    if group is not None and mesh is not None:
        raise OptionError("mesh excludes group: the dimension 'pp' of the mesh is the group of the pipeline")
    groups = TrainingGroups(pipeline=group, whole=group) if mesh is None else groups_of_mesh(mesh)
    _check_backends(groups)
    process_count = torch.distributed.get_world_size(groups.pipeline)
    opened_bundle = _join_stages(opened_bundle, schedule, process_count, stages_per_process)
    rank_of_stage = place_stages_for(schedule, len(opened_bundle.stages), process_count)
    check_microbatches(schedule, microbatches, len(opened_bundle.stages), process_count)
    own_stages = stages_of_rank(rank_of_stage, torch.distributed.get_rank(groups.pipeline))
    dimensions = find_batch_dimensions(opened_bundle, batch_dim, microbatches)
    if not torch.distributed.get_rank(groups.whole):
        for warning in _find_warnings(opened_bundle, dimensions):
            warn_caller(warning)
    watch = None
    if torch.distributed.get_world_size(groups.whole) > 1:
        # Before weights are read, so that a process that is lost meanwhile is noticed.
        members = meet_processes(opened_bundle, own_stages, groups.whole)
        watch = ProcessWatch(members, groups.all_groups, silence_seconds=silence_seconds)
    options = LoadOptions(runtime=TORCH_RUNTIME, allow_ops=allow_ops, verify=verify, copy=True, modules=modules)
    loading = Loading(options=options, types=types, dense_inputs=True, autocast=True)
    try:
        prepared_stages = prepare_placed(
            opened_bundle, dict.fromkeys(own_stages, device), find_runtime(TORCH_RUNTIME), loading
        )
        stages = finish_prepared(opened_bundle, prepared_stages, verify=options.verifies_weights)
        training = Training(
            opened_bundle,
            {number: stage for number, stage in stages.items() if isinstance(stage, TorchStage)},
            TrainingOptions(
                loss=loss,
                microbatches=microbatches,
                schedule=schedule,
                rank_of_stage=rank_of_stage,
                dimensions=dimensions,
                loss_reduction=loss_reduction,
                types=tuple(types),
                allow_ops=tuple(allow_ops),
                modules=modules,
                recompute=recompute,
                seed=seed,
                out=out,
                overwrite=overwrite,
            ),
            groups,
            watch,
        )
        if watch is not None:
            watch.check()
    except BaseException as error:
        if watch is not None:
            watch.close(error)
        raise
    return training


def _join_stages(bundle: Bundle, schedule: str, process_count: int, stages_per_process: Sequence[int]) -> Bundle:
    """Return a bundle with as many stages as a schedule runs, which are joined of those of the bundle."""
    if stages_per_process:
        if isinstance(stages_per_process, str) or not all(type(count) is int for count in stages_per_process):
            raise OptionError(f"stages_per_process: expected numbers of stages, found {stages_per_process!r}")
        return join_bundle(bundle, stages_per_process)
    if not runs_one_stage(schedule) or not 1 < process_count < len(bundle.stages):
        return bundle
    processes = place_stages(bundle.entry_point, range(process_count))
    return join_bundle(bundle, [processes.count(process) for process in range(process_count)])


def _check_words(schedule: str, recompute: Recompute, loss_reduction: Reduction | None) -> None:
    if schedule not in SCHEDULES:
        raise OptionError(f"schedule: expected one of {', '.join(map(repr, SCHEDULES))}, found {schedule!r}")
    if recompute is not None and splits_backward(schedule):
        raise OptionError(
            f"recompute: the schedule {schedule!r} splits the backward pass, and would compute all values twice again: choose another one"
        )
    if loss_reduction not in (None, *get_args(Reduction)):
        raise OptionError(f"loss_reduction: expected 'mean', 'sum' or None, found {loss_reduction!r}")


def _find_warnings(bundle: Bundle, dimensions: BatchDimensions) -> Iterator[Warning]:
    scopes = evaluation_scopes(bundle)
    if scopes:
        yield EvaluationModeWarning(
            f"{len(scopes)} modules with dropout or running statistics, such as {scopes[0]!r}, were exported in evaluation mode, and do in "
            "training what they do there: export the model in training mode to train it so"
        )
    if dimensions.meeting is not None:
        yield MicrobatchWarning(
            f"the gradients are those of each microbatch, and not of the whole batch: {dimensions.meeting}"
        )


def _check_torch() -> None:
    # The lowest of all versions of 2.13, the builds before its release among them.
    if torch.__version__ < "2.13.dev0":
        raise UnsupportedError(
            f"stagepack.train: expected torch 2.13 or newer, found {torch.__version__}, whose schedules need a gradient for each value: "
            "upgrade torch, or train a loaded pipeline in one process, by a loop over loss.backward() and optimizer.step()"
        )


def _check_backends(groups: TrainingGroups) -> None:
    """Check that the groups exchange tensors of the host, such as the loss, and not only those of a GPU."""
    for group in groups.all_groups:
        backends = get_backend_config(group)
        if "cpu:" not in backends:
            raise OptionError(
                f"expected process groups that exchange tensors of the host too, found {backends}: make the default group by "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or leave it to stagepack.train"
            )
