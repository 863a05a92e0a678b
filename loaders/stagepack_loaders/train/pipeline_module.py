"""A stage between its neighbours, as torch.distributed.pipelining calls it: tensors in, tensors out.

- What passes from each stage to the next one when stages exchange values with their neighbours only. Imports no torch. The schedules of
  torch.distributed.pipelining do that. So a value that skips stages passes through these, as do results of the model on their way to the
  last stage, which computes the loss. Inputs of the model do not pass: each process has them.
- Activation checkpointing: the values inside a region are computed again in the backward pass, and not kept from the forward pass.
- Random numbers of a training, such as those of dropout: the same as if one process ran the whole model on each microbatch. Each
  microbatch begins with a seed of its own. The state of the generators passes from stage to stage with the values.
"""

# Long because the boundaries of a stage decide what is recomputed and which random numbers it draws.

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from stagepack.errors import OptionError
from stagepack.format.aliasing import AliasClasses, alias_classes
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Weight
from stagepack.format.manifest import Edge, EntryPoint, Stage
from stagepack.format.reader import Bundle
from stagepack.format.traversal import input_names, output_names
from stagepack.format.tree import value_names
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.build import INPUT_TYPES
from stagepack_loaders.torch.stage import TorchStage

_DIFFERENTIABLE = ("float", "bfloat", "complex")
Recompute = Literal["regions", "stages"] | None
_REGION_PREFIX = "region_"
Result = TypeVar("Result")
_SCALAR_TENSOR_DTYPES = {"symint": torch.int64, "symfloat": torch.float64, "symbool": torch.bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """What one stage takes and returns.

    Attributes:
        model_inputs: the inputs of the model that it uses, in the order of the manifest.
        received: the values that come from the stage before it, in the order of the manifest.
        sent: the values that it passes to the next stage; those of the last stage are the results of the model.
        is_linked: there is a stage before it.
        links_next: there is a stage after it.
    """

    model_inputs: tuple[Edge, ...]
    received: tuple[Edge, ...]
    sent: tuple[Edge, ...]
    is_linked: bool
    links_next: bool


def find_boundaries(entry_point: EntryPoint) -> tuple[StageBoundary, ...]:
    """Return the boundary of each stage."""
    last_stage = len(entry_point.stages) - 1
    results = tuple(dict.fromkeys(value_names(entry_point.signature.result)))
    edges = {edge.name: edge for edge in entry_point.edges}
    for edge_name in results:
        if edges[edge_name].producer is None:
            raise OptionError(f"the result {edge_name} is an input of the model: a schedule cannot return it")
    crossing: list[tuple[Edge, ...]] = [
        tuple(edge for edge in entry_point.edges if _crosses(edge, stage_number, last_stage, edge.name in results))
        for stage_number in range(last_stage)
    ]
    crossing.append(tuple(edges[edge_name] for edge_name in results))
    return tuple(
        StageBoundary(
            model_inputs=tuple(
                edge for edge in entry_point.edges if edge.producer is None and stage_number in edge.consumers
            ),
            received=crossing[stage_number - 1] if stage_number else (),
            sent=crossing[stage_number],
            is_linked=stage_number > 0,
            links_next=stage_number < last_stage,
        )
        for stage_number in range(last_stage + 1)
    )


def _crosses(edge: Edge, stage_number: int, last_stage: int, is_result: bool) -> bool:
    """Whether a value passes from a stage to the next one."""
    if edge.producer is None or edge.producer > stage_number:
        return False
    last_consumer = last_stage if is_result else max(edge.consumers, default=-1)
    return last_consumer > stage_number


def find_differentiable(bundle: Bundle, *, adapts: bool = False) -> frozenset[str]:
    """Return the names of the edges that may need gradients: floating-point values that are computed from trainable parameters.

    It may name more than need them, such as results of functions whose gradient is zero; never fewer.
    """
    dependent: set[str] = set()
    for stage_number in range(len(bundle.stages)):
        graph = bundle.graph_file(stage_number, module_calls=False).graph
        classes = alias_classes(graph)
        # A write into a view makes all values that share its memory depend on what was written.
        dependent_memory = {classes.representative(value_name) for value_name in dependent}
        dependent_memory |= {
            classes.representative(weight.value)
            for weight in graph.weights
            if weight.trainable or (adapts and weight.kind == "parameter")
        }
        for node_number, node in enumerate(graph.nodes):
            used_memory = {classes.representative(value_name) for value_name in input_names(node)}
            if not dependent_memory.isdisjoint(used_memory):
                dependent_memory.update(map(classes.representative, output_names(node)))
                dependent_memory |= {root for root in used_memory if node_number in classes.writers.get(root, ())}
        dependent |= {edge.name for edge in bundle.edges if classes.representative(edge.name) in dependent_memory}
    return frozenset(
        edge.name for edge in bundle.edges if edge.name in dependent and edge.dtype.startswith(_DIFFERENTIABLE)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMemory:
    """The memory that a stage writes in each call.

    Attributes:
        inputs: the inputs whose memory it writes.
        state_outputs: the outputs that share the memory of weights that it writes.
        has_buffers: it writes buffers, and no parameters.
    """

    inputs: frozenset[str]
    state_outputs: frozenset[str]
    has_buffers: bool


def find_written_memory(bundle: Bundle, stage_number: int) -> WrittenMemory:
    """Return the memory that a stage writes."""
    graph = bundle.graph_file(stage_number, module_calls=False).graph
    entry = bundle.stages[stage_number]
    classes = alias_classes(graph)
    written_weights = [weight for weight in graph.weights if classes.is_written(weight.value)]
    state = {classes.representative(weight.value) for weight in written_weights}
    return WrittenMemory(
        inputs=frozenset(name for name in entry.inputs if classes.is_written(name)),
        state_outputs=frozenset(name for name in entry.outputs if classes.representative(name) in state),
        has_buffers=bool(state) and all(weight.kind != "parameter" for weight in written_weights),
    )


class _RecomputedModule(torch.nn.Module):
    """A module of a graph whose values are computed again in the backward pass, with the same random numbers."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Any) -> Any:
        return recomputed(self.module, *values)


def recomputed(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function; autograd keeps its arguments, and calls it again to find what it needs in the backward pass."""
    return checkpoint(function, *values, use_reentrant=False) if torch.is_grad_enabled() else function(*values)


def recompute_regions(stage: TorchStage) -> None:
    """Let each region of a stage be computed again in the backward pass, except those that touch memory that is written.

    The outermost regions are taken. A region that is computed again would update running statistics twice, or read what was written
    after it.
    """
    classes = alias_classes(stage.graph)
    remaining: list[torch.nn.Module] = [stage.graph_module]
    while remaining:
        children = child_modules(remaining.pop())
        for child_name, child in children.items():
            if isinstance(child, GraphModule) and child_name.startswith(_REGION_PREFIX):
                if not _touches_written_memory(child, classes):
                    children[child_name] = _RecomputedModule(child)
            elif child is not None:
                remaining.append(child)


def can_recompute_stage(stage: TorchStage) -> bool:
    """Whether a stage may be computed again: it writes none of its inputs and buffers."""
    classes = alias_classes(stage.graph)
    values = (*(value.name for value in stage.graph.inputs), *(weight.value for weight in stage.graph.weights))
    return not any(classes.is_written(value_name) for value_name in values)


def _touches_written_memory(region: GraphModule, classes: AliasClasses) -> bool:
    """Whether an input of a region, in its first call, is written anywhere in the stage."""
    values = (entry.value if isinstance(entry, Weight) else entry.name for entry in region.meta[INPUT_TYPES])
    return any(classes.is_written(value_name) for value_name in values)


class RandomNumbers:
    """The generators of one stage."""

    def __init__(self, device: torch.device, *, draws: bool, is_received: bool, is_sent: bool) -> None:
        self._device = device
        self._draws = draws
        self.is_received = is_received
        self.is_sent = is_sent
        self._next_seed = 0

    @property
    def is_used(self) -> bool:
        """Whether the stage draws random numbers, or passes the state of generators on."""
        return self._draws or self.is_received or self.is_sent

    def begin(self, first_seed: int) -> None:
        """Set the seed of the first microbatch of a step; that of each other one is the next number."""
        self._next_seed = first_seed

    def run(self, function: Callable[[], Result], state: torch.Tensor | None) -> tuple[Result, torch.Tensor | None]:
        """Call a function on the next microbatch. The generators have their old states afterwards."""
        seed = self._next_seed
        self._next_seed += 1
        if not self._draws:
            return function(), state
        with torch.random.fork_rng(_forked_devices(self._device), device_type=_device_type(self._device)):
            if state is None:
                torch.manual_seed(seed)
            else:
                _set_generator_states(self._device, state.cpu())
            result = function()
            return result, generator_states(self._device).to(self._device) if self.is_sent else None


def random_numbers_of_stage(device: torch.device, stage_number: int, random_stages: Sequence[int]) -> RandomNumbers:
    """Return the generators of a stage. Their state passes from the first stage that draws numbers to the last one.

    random_stages: the stages that draw random numbers, ascending.
    """
    first, last = (random_stages[0], random_stages[-1]) if random_stages else (stage_number, stage_number)
    return RandomNumbers(
        device,
        draws=stage_number in random_stages,
        is_received=first < stage_number <= last,
        is_sent=first <= stage_number < last,
    )


def generator_states(device: torch.device) -> torch.Tensor:
    """Return the states of the generator of the host and of that of a device, in one tensor of bytes."""
    host_state = torch.get_rng_state()
    if device.type == "cpu":
        return host_state
    device_state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return torch.cat([host_state, device_state])


def _set_generator_states(device: torch.device, states: torch.Tensor) -> None:
    host_bytes = len(torch.get_rng_state())
    torch.set_rng_state(states[:host_bytes])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[host_bytes:], device)


def _forked_devices(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]


def _device_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


class PipelineModule(torch.nn.Module):
    """A stage that takes the values of the stage before it by position and inputs of the model by name.

    It returns a tuple of the values of the next stage, or the results of the model. Values that skip stages pass through it.
    """

    def __init__(
        self,
        stage: TorchStage,
        entry: Stage,
        boundary: StageBoundary,
        differentiable: Collection[str],
        written: WrittenMemory,
        random_numbers: RandomNumbers,
        *,
        splits_backward: bool,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.random_numbers = random_numbers
        self._entry = entry
        self._boundary = boundary
        self._written = written
        self._splits_backward = splits_backward
        self._received_names = [edge.name for edge in boundary.received]
        self._scalar_names = {
            edge.name for edge in (*boundary.received, *boundary.model_inputs) if edge.dtype in SCALAR_DTYPES
        }
        # What is sent, with its dtype, and whether the next stage sends a gradient back; no dtype for a scalar.
        self._sent = [
            (edge, None if edge.dtype in SCALAR_DTYPES else edge_dtype(edge), edge.name in differentiable)
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
        self._unpacks = bool(self._copies_gradients or self._scalar_names or written.inputs)
        self._weights: list[torch.Tensor] | None = None

    def begin(self, first_seed: int) -> None:
        """Begin a step, with the seed of the first microbatch."""
        self.random_numbers.begin(first_seed)
        # Looked up once in a step, unless each microbatch has buffers of its own.
        self._weights = None if self._written.has_buffers else self.stage.weights()

    def forward(self, *received: torch.Tensor, **model_inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the stage on a microbatch.

        **model_inputs: the inputs of the model, tensors with a first dimension of size 1; those that the stage does not use are left out.
        """
        values: dict[str, Any] = dict(zip(self._received_names, received, strict=False))
        for input_name, value in model_inputs.items():
            values[input_name] = value[0] if isinstance(value, torch.Tensor) else value
        inputs = [values[edge_name] for edge_name in self._entry.inputs]
        if self._unpacks:
            inputs = [self._unpacked(*pair) for pair in zip(self._entry.inputs, inputs, strict=True)]
        if self._written.has_buffers:
            self._renew_state()
        random_state = None
        if self.random_numbers.is_used:
            random_state = received[-1] if self.random_numbers.is_received else None
            outputs, random_state = self.random_numbers.run(lambda: self._run_stage(inputs), random_state)
        else:
            outputs = self._run_stage(inputs)
        values.update(zip(self._entry.outputs, outputs, strict=True))
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
        tensor = value.clone() if edge_name in self._written.inputs else value
        return _Received.apply(tensor) if self._copies_gradients and tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    def _packed(self, edge: Edge, dtype: torch.dtype | None, value: Any, is_differentiable: bool) -> torch.Tensor:
        """A value as it is sent: its bytes are its numbers, and it has a gradient function if the next stage sends a gradient back."""
        if dtype is None:
            return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=scalar_dtype(edge))
        # Autocast computes other dtypes than those of the boundary contract.
        tensor: torch.Tensor = value
        if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.to(dtype).contiguous().resolve_conj().resolve_neg()
        if edge.name in self._written.state_outputs:
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
