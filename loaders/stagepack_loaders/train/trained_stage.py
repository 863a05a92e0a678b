"""A stage of a schedule of torch, which tells a value that no gradient reaches from one whose gradient is zero."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed.pipelining import PipelineStage

_TAG = 4  # of flags; see `shared_parameters` and `loss_exchange` for the others


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
