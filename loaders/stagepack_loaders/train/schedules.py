"""The schedules of torch.distributed.pipelining: which stages each process runs, and the schedule for microbatches of some sizes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
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
from stagepack_loaders.train.pipeline_module import (
    PipelineModule,
    StageBoundary,
    backward_link,
    edge_dtype,
    generator_states,
    scalar_dtype,
)
from stagepack_loaders.train.trained_stage import TrainedStage

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


def splits_backward(schedule: str) -> bool:
    """Whether a schedule computes the gradients of inputs and of weights apart."""
    return schedule in _SPLIT_BACKWARD


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


class ScheduleCache:
    """The schedules of one process. Stages of torch have fixed shapes, so each combination of sizes has a schedule of its own."""

    def __init__(
        self,
        schedule: str,
        modules: Mapping[int, PipelineModule],
        boundaries: Sequence[StageBoundary],
        differentiable: Collection[str],
        loss: Callable[..., torch.Tensor],
        *,
        microbatches: int,
        group: ProcessGroup | None,
    ) -> None:
        self._schedule = schedule
        self._modules = modules
        self._boundaries = boundaries
        self._differentiable = differentiable
        self._loss = loss
        self._microbatches = microbatches
        self._group = group
        self._schedules: dict[tuple[tuple[str, int], ...], Any] = {}

    def find(self, sizes: Mapping[str, int]) -> Any:
        """Return the schedule for microbatches of some sizes."""
        key = tuple(sorted(sizes.items()))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(sizes)
        return self._schedules[key]

    def _make_schedule(self, sizes: Mapping[str, int]) -> Any:
        stages = [
            TrainedStage(
                module,
                number,
                len(self._boundaries),
                module.stage.device,
                input_args=self._examples(
                    boundary.received, sizes, is_linked=boundary.is_linked, has_state=module.random_numbers.is_received
                ),
                output_args=self._examples(
                    boundary.sent, sizes, is_linked=boundary.links_next, has_state=module.random_numbers.is_sent
                ),
                group=self._group,
            )
            for number, module in self._modules.items()
            for boundary in [self._boundaries[number]]
        ]
        schedule_class = SCHEDULES[self._schedule]
        try:
            return schedule_class(
                stages[0] if self._schedule in _SINGLE_STAGE else stages,
                n_microbatches=self._microbatches,
                loss_fn=self._loss,
                # It would scale the gradients of earlier steps again.
                scale_grads=False,
            )
        except ValueError as error:
            raise OptionError(f"schedule {self._schedule!r}: {error}") from None

    def _examples(
        self, edges: Sequence[Edge], sizes: Mapping[str, int], *, is_linked: bool, has_state: bool
    ) -> tuple[torch.Tensor, ...]:
        """Tensors without data for the values that pass between two stages."""
        examples = [self._example(edge, sizes) for edge in edges]
        if is_linked and self._schedule in _SPLIT_BACKWARD:
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
        return torch.empty(
            shape, dtype=edge_dtype(edge), device="meta", requires_grad=edge.name in self._differentiable
        )
