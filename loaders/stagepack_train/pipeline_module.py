"""A stage between its neighbours, as torch.distributed.pipelining calls it: tensors in, tensors out."""

from typing import Any, TypeVar

import torch

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack_loaders.torch.stage import TorchStage
from stagepack_train.boundaries import StageBoundary
from stagepack_train.random_numbers import RandomNumbers
from stagepack_train.recomputation import can_recompute_stage, recompute_regions, recomputed
from stagepack_train.training_options import Recompute

_REGION_PREFIX = "region_"
Result = TypeVar("Result")
_SCALAR_TENSOR_DTYPES = {"symint": torch.int64, "symfloat": torch.float64, "symbool": torch.bool}


class PipelineModule(torch.nn.Module):
    """A stage that takes the values of the stage before it by position and inputs of the model by name.

    It returns a tuple of the values of the next stage, or the results of the model. Values that skip stages pass through it.
    """

    def __init__(
        self,
        stage: TorchStage,
        boundary: StageBoundary,
        random_numbers: RandomNumbers,
        *,
        splits_backward: bool,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.random_numbers = random_numbers
        self._boundary = boundary
        self._splits_backward = splits_backward
        self._received_names = [edge.name for edge in boundary.received]
        self._scalar_names = {
            edge.name for edge in (*boundary.received, *boundary.model_inputs) if edge.dtype in SCALAR_DTYPES
        }
        # What is sent, with its dtype, and whether the next stage sends a gradient back; no dtype for a scalar.
        self._sent = [
            (edge, None if edge.dtype in SCALAR_DTYPES else edge_dtype(edge), edge.name in boundary.differentiable)
            for edge in boundary.sent
        ]
        self._recomputes = recompute == "stages" and can_recompute_stage(stage)
        if recompute == "regions":
            recompute_regions(stage)
        # Gradients of the inputs of a stage are contiguous where torch accumulates them, which it does not when it splits the pass.
        self._copies_gradients = splits_backward or any(
            value is not None and value.dtype.startswith("complex")
            for node in stage.graph.nodes
            for value in node.outputs
        )
        self._unpacks = bool(self._copies_gradients or self._scalar_names or boundary.written_inputs)
        self._weights: list[torch.Tensor] | None = None

    def begin(self, first_seed: int) -> None:
        """Begin a step, with the seed of the first microbatch."""
        self.random_numbers.begin(first_seed)
        # Looked up once in a step, unless each microbatch has buffers of its own.
        self._weights = None if self._boundary.writes_buffers else self.stage.weights()

    def forward(self, *received: torch.Tensor, **model_inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the stage on a microbatch.

        **model_inputs: the inputs of the model, tensors with a first dimension of size 1; those that the stage does not use are left out.
        """
        values: dict[str, Any] = dict(zip(self._received_names, received, strict=False))
        for input_name, value in model_inputs.items():
            values[input_name] = value[0] if isinstance(value, torch.Tensor) else value
        inputs = [values[edge_name] for edge_name in self._boundary.entry.inputs]
        if self._unpacks:
            inputs = [self._unpacked(*pair) for pair in zip(self._boundary.entry.inputs, inputs, strict=True)]
        if self._boundary.writes_buffers:
            self._renew_state()
        random_state = None
        if self.random_numbers.is_used:
            random_state = received[-1] if self.random_numbers.is_received else None
            outputs, random_state = self.random_numbers.run(lambda: self._run_stage(inputs), random_state)
        else:
            outputs = self._run_stage(inputs)
        values.update(zip(self._boundary.entry.outputs, outputs, strict=True))
        sent = [self._packed(edge, dtype, values[edge.name], is_back) for edge, dtype, is_back in self._sent]
        if self._splits_backward:
            link = (
                received[len(self._boundary.received)] if self._boundary.is_linked else backward_link(self.stage.device)
            )
            linked = (*sent, link) if self._boundary.links_next else sent
            sent = [_Linked.apply(tensor, link) if tensor.requires_grad else tensor for tensor in linked]  # type: ignore[no-untyped-call]
        return (*sent, random_state) if self.random_numbers.is_sent and random_state is not None else tuple(sent)

    def _run_stage(self, inputs: list[Any]) -> tuple[Any, ...]:
        if not self._recomputes:
            return self.stage.run(inputs, self._weights)
        outputs: tuple[Any, ...] = recomputed(lambda *values: self.stage.run(list(values), self._weights), *inputs)
        return outputs

    @torch.no_grad()
    def _renew_state(self) -> None:
        """Go on with a copy of the buffers that calls write: autograd may need those that earlier microbatches have used."""
        copies = self.stage.fresh_state()
        for duplicate, buffer_memory in zip(copies, self.stage.swap_state(copies), strict=True):
            duplicate.copy_(buffer_memory)

    def _unpacked(self, edge_name: str, value: Any) -> Any:
        """A value as the stage takes it."""
        if edge_name in self._scalar_names:
            return value.item() if isinstance(value, torch.Tensor) else value
        # A received tensor is a leaf of autograd, which nothing may write.
        tensor = value.clone() if edge_name in self._boundary.written_inputs else value
        return _Received.apply(tensor) if self._copies_gradients and tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    def _packed(self, edge: Edge, dtype: torch.dtype | None, value: Any, is_differentiable: bool) -> torch.Tensor:
        """A value as it is sent: its bytes are its numbers, and it has a gradient function if the next stage sends a gradient back."""
        if dtype is None:
            return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=scalar_dtype(edge))
        tensor: torch.Tensor = value.contiguous().resolve_conj().resolve_neg()
        if edge.name in self._boundary.state_outputs:
            # The next microbatch writes it.
            tensor = tensor.clone()
        if not is_differentiable:
            return tensor.detach()
        if torch.is_grad_enabled() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        return tensor.view_as(tensor) if tensor.is_leaf else tensor


class _Received(torch.autograd.Function):
    """A tensor whose gradient can be sent: it is contiguous, and no lazy conjugate or negative of its numbers."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradients[0] is None else gradients[0].contiguous().resolve_conj().resolve_neg()


class _Linked(torch.autograd.Function):
    """A copy of a tensor that autograd takes for a function of another one too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradients[0], None


def backward_link(device: Any) -> torch.Tensor:
    """Return the additional value that passes through all stages of a schedule that splits the backward pass.

    torch finds the gradients of weights by the nodes at which paths from the inputs of a stage and from its weights meet, and loses
    those of weights whose paths meet none (`stage_backward_input` in `torch.distributed.pipelining._backward`, 2.13). So every output
    is linked to an input. It is no view either, which torch could not detach in place.
    """
    return torch.zeros((), device=device, requires_grad=True)


def edge_dtype(edge: Edge) -> torch.dtype:
    """The dtype of a tensor by the boundary contract."""
    dtype: torch.dtype = getattr(torch, edge.dtype)
    return dtype


def scalar_dtype(edge: Edge) -> torch.dtype:
    """The dtype of the tensor that a symbolic scalar is sent as."""
    return _SCALAR_TENSOR_DTYPES[edge.dtype]
