"""Train the stages of a bundle in the processes that a launcher has started."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from stagepack.errors import InputError, OptionError
from stagepack.format.contract import bind_call
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import evaluate_dim
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant_value, unflatten_tree
from stagepack.graph.aliasing import alias_classes
from stagepack_loaders.base import PrepareOptions, Verify
from stagepack_loaders.preparation import finish_prepared, open_for_loading, prepare_placed
from stagepack_loaders.torch.stage import TorchStage
from stagepack_loaders.train.boundaries import find_boundaries, find_differentiable
from stagepack_loaders.train.microbatches import CallInputs, cut_inputs
from stagepack_loaders.train.pipeline_module import PipelineModule, backward_link, scalar_dtype
from stagepack_loaders.train.shared_parameters import GradientSums, find_shared_parameters

# The schedules of torch by name. The first two run one stage in each process.
SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv-zero-bubble": ScheduleZBVZeroBubble,
}
_SINGLE_STAGE = ("gpipe", "1f1b")
_SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv-zero-bubble")

_SMALLEST_NORM = 1e-6  # as in torch

# The mean loss of a microbatch, of the result of the model and the target.
Loss = Callable[[Any, Any], torch.Tensor]


def train(
    bundle: str | os.PathLike[str] | Bundle,
    loss: Loss,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    device: Any = "cpu",
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    group: ProcessGroup | None = None,
) -> "Training":
    """Load the stages of this process for training. Each process that ``torchrun`` has started calls this with the same arguments.

    The processes exchange activations and gradients by torch.distributed; the default process group is made if there is none. Captured
    graphs do what the model did at export: dropout and batch norm of a model that was exported in evaluation mode stay so.

    Args:
        bundle: the folder of the bundle, or an opened bundle.
        loss: returns the mean loss of a microbatch, given the result of the model, in its containers, and the target. It runs in the
            process of the last stage.
        microbatches: the number of microbatches of equal size that a batch is cut into.
        schedule: the order in which stages work on microbatches: ``gpipe`` or ``1f1b`` for one stage in each process; ``looped-bfs``,
            ``interleaved-1f1b``, ``interleaved-zero-bubble`` or ``zbv-zero-bubble`` for several.
        device: the device of this process.
        types: as for `stagepack.load`.
        allow_ops: as for `stagepack.load`.
        verify: as for `stagepack.load`.
        group: the processes of the pipeline; None for all.

    Raises:
        OptionError: there is no such schedule, or it does not fit the numbers of stages, processes or microbatches; or a value depends on
            data, or on the result of an earlier call.
        StagepackError: the stages cannot be loaded; see `stagepack.load`.

    Examples:
        >>> training = stagepack.train("m.stagepack", torch.nn.functional.cross_entropy, microbatches=8)
        >>> optimizer = torch.optim.AdamW(training.parameters(), lr=1e-4)
        >>> for images, labels in batches:
        ...     loss = training.step(images, target=labels)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    opened_bundle = open_for_loading(bundle, verify)
    if schedule not in SCHEDULES:
        raise OptionError(f"schedule: expected one of {', '.join(map(repr, SCHEDULES))}, found {schedule!r}")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    rank_of_stage = place_stages_for(schedule, len(opened_bundle.stages), torch.distributed.get_world_size(group))
    own_stages = [number for number, rank in enumerate(rank_of_stage) if rank == torch.distributed.get_rank(group)]
    options = PrepareOptions(allow_ops=allow_ops, dense_inputs=True, copy=True)
    prepared_stages = prepare_placed(opened_bundle, dict.fromkeys(own_stages, device), "torch", options)
    stages = finish_prepared(opened_bundle, prepared_stages, verify=verify == "full")
    return Training(
        opened_bundle,
        {number: stage for number, stage in stages.items() if isinstance(stage, TorchStage)},
        rank_of_stage,
        loss,
        microbatches=microbatches,
        schedule=schedule,
        types=types,
        allow_ops=allow_ops,
        group=group,
    )


def place_stages_for(schedule: str, stage_count: int, process_count: int) -> tuple[int, ...]:
    """Return the process of each stage, as a schedule needs it.

    Raises:
        OptionError: the schedule does not run so many stages in so many processes.
    """
    if schedule in _SINGLE_STAGE and stage_count != process_count:
        raise OptionError(
            f"schedule {schedule!r} runs one stage in each process: expected {stage_count} processes, found {process_count}"
        )
    if schedule == "zbv-zero-bubble":
        if stage_count != 2 * process_count:
            raise OptionError(
                f"schedule {schedule!r} runs two stages in each process: expected {stage_count // 2} processes, found {process_count}"
            )
        return tuple(min(number, stage_count - 1 - number) for number in range(stage_count))
    if stage_count % process_count:
        raise OptionError(
            f"schedule {schedule!r} runs equally many stages in each process: {stage_count} stages do not divide into {process_count}"
        )
    return tuple(number % process_count for number in range(stage_count))


class Training:
    """The stages of one process, with the schedule by which all processes train.

    Attributes:
        bundle: the bundle.
        stages: the stages of this process, by stage number.
        rank: the number of this process in the pipeline.
        process_count: the number of processes.
        group: the processes; None for all.
        allow_ops: the namespaces of custom operators that may run.
    """

    def __init__(
        self,
        bundle: Bundle,
        stages: Mapping[int, TorchStage],
        rank_of_stage: Sequence[int],
        loss: Loss,
        *,
        microbatches: int,
        schedule: str,
        types: Collection[type],
        allow_ops: Collection[str],
        group: ProcessGroup | None,
    ) -> None:
        """Connect the stages. All processes must call this at the same time.

        Args:
            bundle: the bundle.
            stages: the stages of this process, by stage number.
            rank_of_stage: the process of each stage.
            loss: see `train`.
            microbatches: see `train`.
            schedule: see `train`.
            types: see `train`.
            allow_ops: see `train`.
            group: see `train`.

        Raises:
            OptionError: see `train`.
        """
        self.bundle = bundle
        self.stages = dict(stages)
        self.rank = torch.distributed.get_rank(group)
        self.process_count = torch.distributed.get_world_size(group)
        self.group = group
        self.allow_ops = tuple(allow_ops)
        self._entry_point = bundle.entry_point
        self._inputs = tuple(edge for edge in bundle.edges if edge.producer is None)
        self._boundaries = find_boundaries(bundle.entry_point)
        self._differentiable = find_differentiable(bundle)
        self._loss = loss
        self._microbatches = microbatches
        self._schedule = schedule
        self._types = tuple(types)
        self._last_rank = rank_of_stage[-1]
        self._is_last = len(bundle.stages) - 1 in stages
        self._modules = {
            number: PipelineModule(
                stage,
                bundle.stages[number],
                self._boundaries[number],
                self._differentiable,
                _written_inputs(bundle, number),
                splits_backward=schedule in _SPLIT_BACKWARD,
            )
            for number, stage in stages.items()
        }
        self._schedules: dict[tuple[tuple[str, int], ...], Any] = {}
        self._targets: list[Any] = []
        shared_parameters = find_shared_parameters(bundle, rank_of_stage)
        self._counted_elsewhere = {parameter.name for parameter in shared_parameters if parameter.ranks[0] != self.rank}
        self._gradient_sums = GradientSums(shared_parameters, dict(self.named_parameters()), group)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of this process, each once, with their names in the model."""
        known: set[int] = set()
        for stage in self.stages.values():
            for parameter_name, parameter in stage.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield parameter_name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this process, each once, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all processes is at most some number; see `torch.nn.utils.clip_grad_norm_`.

        All processes must call it. A parameter of which several processes have a copy counts once.

        Args:
            max_norm: the largest 2-norm.

        Returns:
            The 2-norm before, float64.
        """
        gradients = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64)
        for parameter_name, gradient in gradients:
            if parameter_name not in self._counted_elsewhere:
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().cpu()
        torch.distributed.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        factor = float(max_norm / (norm + _SMALLEST_NORM))
        if factor < 1:
            for _, gradient in gradients:
                gradient.mul_(factor)
        return norm

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and persistent buffers that this process saves, each once; all processes together save all of them."""
        known: set[int] = set()
        for stage in self.stages.values():
            for weight_name, tensor in stage.state_dict(keep_vars=True).items():
                is_new = id(tensor) not in known
                known.add(id(tensor))
                if is_new and weight_name not in self._counted_elsewhere:
                    yield weight_name, tensor.detach()

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run a batch forward and backward. Gradients are added to those of the parameters.

        All processes call it with the same batch; each uses what its stages need.

        Args:
            *args: the arguments of the model.
            target: a tensor, or a container of tensors, whose first dimension is that of the batch; passed to the loss.
            **kwargs: the keyword arguments of the model.

        Returns:
            The mean loss of the microbatches, in all processes.

        Raises:
            InputError: the batch does not fit the bundle, or is no multiple of the number of microbatches.
        """
        arguments = bind_call(self._entry_point.signature, args, kwargs)
        call = cut_inputs(self._inputs, arguments, self._entry_point.symbols, self._microbatches)
        schedule = self._find_schedule(call)
        own_names = {edge.name for number in self.stages for edge in self._boundaries[number].model_inputs}
        for module in self._modules.values():
            module.replicated = call.replicated
        losses: list[torch.Tensor] = []
        self._gradient_sums.begin()
        own_inputs = {input_name: value for input_name, value in call.values.items() if input_name in own_names}
        if self._is_last:
            self._targets = _cut_target(target, self._microbatches)
            schedule.step(target=torch.arange(self._microbatches), losses=losses, return_outputs=False, **own_inputs)
        else:
            schedule.step(return_outputs=False, **own_inputs)
        self._gradient_sums.finish()
        mean_loss = (
            torch.stack(losses).sum().detach().double().cpu() if losses else torch.zeros((), dtype=torch.float64)
        )
        source_rank = (
            self._last_rank if self.group is None else torch.distributed.get_global_rank(self.group, self._last_rank)
        )
        torch.distributed.broadcast(mean_loss, source_rank, group=self.group)
        return mean_loss

    def _find_schedule(self, call: CallInputs) -> Any:
        """The schedule of torch for microbatches of some sizes: its stages have fixed shapes."""
        key = tuple(sorted(call.sizes.items()))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(call.sizes)
        return self._schedules[key]

    def _make_schedule(self, sizes: Mapping[str, int]) -> Any:
        stages = [
            PipelineStage(
                module,
                number,
                len(self._entry_point.stages),
                module.stage.device,
                input_args=self._examples(boundary.received, sizes, is_linked=boundary.is_linked),
                output_args=self._examples(boundary.sent, sizes, is_linked=boundary.links_next),
                group=self.group,
            )
            for number, module in self._modules.items()
            for boundary in [self._boundaries[number]]
        ]
        schedule_class = SCHEDULES[self._schedule]
        try:
            return schedule_class(
                stages[0] if self._schedule in _SINGLE_STAGE else stages,
                n_microbatches=self._microbatches,
                loss_fn=self._microbatch_loss,
                # It would scale the gradients of earlier steps again.
                scale_grads=False,
            )
        except ValueError as error:
            raise OptionError(f"schedule {self._schedule!r}: {error}") from None

    def _examples(
        self, edges: Sequence[Edge], sizes: Mapping[str, int], *, is_linked: bool
    ) -> tuple[torch.Tensor, ...]:
        """Tensors without data for the values that pass between two stages."""
        examples = [self._example(edge, sizes) for edge in edges]
        if is_linked and self._schedule in _SPLIT_BACKWARD:
            examples.append(backward_link("meta"))
        return tuple(examples)

    def _example(self, edge: Edge, sizes: Mapping[str, int]) -> torch.Tensor:
        """A tensor without data, of the shape that a value has in each microbatch."""
        if edge.dtype in SCALAR_DTYPES:
            return torch.empty((), dtype=scalar_dtype(edge), device="meta")
        try:
            shape = [evaluate_dim(dim, sizes) for dim in edge.shape]
        except KeyError:
            raise OptionError(
                f"the shape of {edge.name} depends on data: schedules of torch exchange tensors of fixed shapes"
            ) from None
        dtype: torch.dtype = getattr(torch, edge.dtype)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=edge.name in self._differentiable)

    def _microbatch_loss(self, results: tuple[torch.Tensor, ...], microbatch_index: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch, which is given by its number."""
        edges = self._boundaries[-1].sent
        result_values = {
            edge.name: value.item() if edge.dtype in SCALAR_DTYPES else value
            for edge, value in zip(edges, results, strict=True)
        }

        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return result_values[leaf.name] if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        result = unflatten_tree(self._entry_point.signature.result, leaf_value, self._types)
        return self._loss(result, self._targets[int(microbatch_index)]) / self._microbatches


def _cut_target(target: Any, microbatch_count: int) -> list[Any]:
    """The target of each microbatch.

    Raises:
        InputError: the first dimension of a tensor is no multiple of the number of microbatches.
    """
    if isinstance(target, torch.Tensor):
        if len(target) % microbatch_count:
            raise InputError(f"target: expected a multiple of {microbatch_count} rows, found {len(target)}")
        return list(target.chunk(microbatch_count))
    if isinstance(target, Mapping):
        parts = {key: _cut_target(entry, microbatch_count) for key, entry in target.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(microbatch_count)]
    if isinstance(target, list | tuple):
        columns = [_cut_target(entry, microbatch_count) for entry in target]
        return [type(target)(column[index] for column in columns) for index in range(microbatch_count)]
    return [target] * microbatch_count


def _written_inputs(bundle: Bundle, stage_number: int) -> frozenset[str]:
    """The inputs of a stage whose memory it writes."""
    classes = alias_classes(bundle.graph_file(stage_number, module_calls=False).graph)
    return frozenset(name for name in bundle.stages[stage_number].inputs if classes.is_written(name))
