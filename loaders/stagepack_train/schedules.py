"""The schedules of torch.distributed.pipelining: which stages each process runs, and the schedule for microbatches of some sizes."""

from collections.abc import Callable, Mapping, Sequence
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

from stagepack.errors import OptionError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import evaluate_dim
from stagepack_train.boundaries import StageBoundary
from stagepack_train.pipeline_module import PipelineModule, backward_link, edge_dtype, scalar_dtype
from stagepack_train.random_numbers import generator_states
from stagepack_train.training_options import TrainingOptions

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
_IN_ROUNDS = ("interleaved-1f1b", "interleaved-zero-bubble")
_TAG = 4  # of flags; see `shared_parameters` and `loss` for the others


def splits_backward(schedule: str) -> bool:
    """Whether a schedule computes the gradients of inputs and of weights apart."""
    return schedule in _SPLIT_BACKWARD


def runs_one_stage(schedule: str) -> bool:
    """Whether a schedule runs one stage in each process."""
    return schedule in _SINGLE_STAGE


def place_stages_for(schedule: str, stage_count: int, process_count: int) -> tuple[int, ...]:
    """Return the process of each stage, as a schedule needs it."""
    if schedule in _SINGLE_STAGE and stage_count != process_count:
        raise OptionError(
            f"schedule {schedule!r} runs one stage in each process: expected {stage_count} processes, found {process_count}: run torchrun "
            f"--nproc-per-node {stage_count} SCRIPT, or choose a schedule of several stages in each process, such as 'looped-bfs'"
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


def check_microbatches(schedule: str, microbatch_count: int, stage_count: int, process_count: int) -> None:
    """Check that a schedule runs a number of microbatches, by the rules of torch."""
    if type(microbatch_count) is not int or microbatch_count < 1:
        raise OptionError(f"microbatches: expected an integer from 1 on, found {microbatch_count!r}")
    if schedule == "1f1b" and microbatch_count < stage_count:
        raise OptionError(
            f"schedule '1f1b' runs at least one microbatch for each stage: expected {stage_count} microbatches or more, found "
            f"{microbatch_count}: choose 'gpipe', or more microbatches"
        )
    round_count = max(1, microbatch_count // process_count)
    if schedule in _IN_ROUNDS and microbatch_count % round_count:
        raise OptionError(
            f"schedule {schedule!r} runs microbatches in rounds of equal size, about one for each of {process_count} processes: expected a "
            f"multiple of {round_count} microbatches, found {microbatch_count}: choose a multiple of {process_count}, or 'looped-bfs'"
        )


class TrainedStage(PipelineStage):
    """Runs the backward pass from the outputs that have a gradient only, as autograd does in one process.

    torch 2.13 sends zeros to the stage before for a value that the loss does not depend on (`get_bwd_send_ops`). With them, parameters
    that have no gradient in one process have one of zeros, by which AdamW decays them, and infinite derivatives make it NaN. So a flag
    for each value goes beside the gradients of a microbatch. Flags are tensors of the host, so that no GPU is waited for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_gradient: dict[int, Sequence[bool]] = {}  # of the outputs, by microbatch
        self._receiving: dict[int, tuple[torch.Tensor, Any]] = {}
        self._sending: list[tuple[torch.Tensor, Any]] = []
        self._current: Sequence[bool] | None = None

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[torch.distributed.P2POp]:
        """Receive the flags of a microbatch beside its gradients."""
        ops: list[torch.distributed.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        if ops:
            flags = torch.empty(len(self.grad_recv_info[bwd_chunk_id]), dtype=torch.uint8)
            rank = self.stage_index_to_group_rank[self.stage_index + 1]
            work = torch.distributed.irecv(flags, group=self.group, group_src=rank, tag=_TAG)
            self._receiving[bwd_chunk_id] = flags, work
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[torch.distributed.P2POp]:
        """Send the flags of a microbatch beside its gradients."""
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        ops: list[torch.distributed.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        if ops:
            flags = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
            rank = self.stage_index_to_group_rank[self.stage_index - 1]
            work = torch.distributed.isend(flags, group=self.group, group_dst=rank, tag=_TAG)
            self._sending.append((flags, work))
        return ops

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from the next stage, which this process runs too."""
        self._has_gradient[mb_index] = [gradient is not None for gradient in next_stage_bwd_outputs]
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a microbatch, or the part of it that leads to the inputs."""
        if bwd_chunk_id in self._receiving:
            flags, work = self._receiving.pop(bwd_chunk_id)
            work.wait()
            self._has_gradient[bwd_chunk_id] = flags.tolist()
        self._current = self._has_gradient.get(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the part of the backward pass of a microbatch that leads to the weights."""
        self._current = self._has_gradient.get(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Leave out the outputs that have no gradient."""
        if self._current is not None and bwd_kwargs.get("output_grads") is not None:
            columns = zip(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], self._current, strict=True)
            reached = [(output, gradient) for output, gradient, has_gradient in columns if has_gradient]
            if not reached:
                return (None,) * len(bwd_kwargs["input_values"]), []
            outputs, gradients = zip(*reached, strict=True)
            bwd_kwargs = bwd_kwargs | {"stage_output": outputs, "output_grads": gradients}
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def clear_runtime_states(self) -> None:
        """Forget the flags of the step."""
        super().clear_runtime_states()
        self._has_gradient.clear()
        for _, work in self._sending:
            work.wait()
        self._sending.clear()


class ScheduleCache:
    """The schedules of one process. Stages of torch have fixed shapes, so each combination of sizes has a schedule of its own."""

    def __init__(
        self,
        options: TrainingOptions,
        modules: Mapping[int, PipelineModule],
        boundaries: Sequence[StageBoundary],
        loss: Callable[..., torch.Tensor],
        group: ProcessGroup | None,
    ) -> None:
        self._options = options
        self._modules = modules
        self._boundaries = boundaries
        self._differentiable = boundaries[0].differentiable  # of all stages
        self._loss = loss
        self._group = group
        self._schedules: dict[tuple[tuple[str, int], ...], Any] = {}

    def find(self, sizes: Mapping[str, int]) -> Any:
        """Return the schedule for microbatches of some sizes."""
        key = tuple(sorted(sizes.items()))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(sizes)
        return self._schedules[key]

    def _make_schedule(self, sizes: Mapping[str, int]) -> Any:
        stages = []
        for number, module in self._modules.items():
            boundary, numbers = self._boundaries[number], module.random_numbers
            stages.append(
                TrainedStage(
                    module,
                    number,
                    len(self._boundaries),
                    module.stage.device,
                    input_args=self._examples(boundary.received, sizes, boundary.is_linked, numbers.is_received),
                    output_args=self._examples(boundary.sent, sizes, boundary.links_next, numbers.is_sent),
                    group=self._group,
                )
            )
        schedule = self._options.schedule
        try:
            return SCHEDULES[schedule](
                stages[0] if schedule in _SINGLE_STAGE else stages,
                n_microbatches=self._options.microbatches,
                loss_fn=self._loss,
                # The schedule would scale the gradients of earlier steps again.
                scale_grads=False,
            )
        except ValueError as error:
            raise OptionError(f"schedule {schedule!r}: {error}") from None

    def _examples(
        self, edges: Sequence[Edge], sizes: Mapping[str, int], is_linked: bool, has_state: bool
    ) -> tuple[torch.Tensor, ...]:
        """Tensors without data for the values that pass between two stages."""
        examples = [self._example(edge, sizes) for edge in edges]
        if is_linked and splits_backward(self._options.schedule):
            examples.append(backward_link("meta"))
        if has_state:
            device = next(iter(self._modules.values())).stage.device
            examples.append(generator_states(device).to("meta"))
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
        is_differentiable = edge.name in self._differentiable
        return torch.empty(shape, dtype=edge_dtype(edge), device="meta", requires_grad=is_differentiable)
