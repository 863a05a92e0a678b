"""A stage as a `torch.nn.Module`."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stagepack.errors import DeviceError, InputError, OperatorError
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import Stage as StageEntry
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor
from stagepack.torch_internals import child_modules, mark_non_persistent, weight_tensors
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.callable_stage import bind_inputs, check_inputs
from stagepack_loaders.torch.build import build
from stagepack_loaders.torch.build_modules import build_modules
from stagepack_loaders.torch.modules import Container, ModuleCallBody, attach, module_tree
from stagepack_loaders.torch.ops import resolve
from stagepack_loaders.torch.slots import Slot
from stagepack_loaders.torch.weights import WeightCache


class TorchStage(Container):
    """One stage of a bundle: called with its inputs, by position or by edge name, it returns a tuple of its outputs.

    Its parameters and buffers have the names that they have in the model, so `state_dict` is a part of the model's.

    Attributes:
        runtime: ``"torch"``.
        graph: the stage as data.
        device: where its weights are, and where it moves its inputs.
    """

    runtime = "torch"

    def __init__(
        self,
        graph: Graph,
        graph_module: torch.fx.GraphModule,
        run: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        state: Collection[str] = (),
        calls: Sequence[ModuleCallBody] = (),
    ) -> None:
        """`run` is `graph_module`, or the same compiled.

        `tensors` holds the weights by the name of their value; `state` names those that a call writes; `calls` are those of the
        model's modules, if it runs by them.
        """
        super().__init__()
        self.graph = graph
        self.device = device
        # Held in a tuple, not registered as a child: the names in state_dict are the model's own.
        self._held = (graph_module, run)
        # All attributes come before the weights: torch refuses one that has the name of a parameter or buffer.
        self._slots: list[Slot] = []
        self._initial: list[torch.Tensor] = []
        self._written: list[tuple[Slot, int]] = []
        for path, module in module_tree(calls):
            *around, name = path.split(".")
            child_modules(_owner(self, around))[name] = module
        kept: dict[int, int] = {}  # weights may share memory: where it lies -> its number
        for weight in graph.weights:
            slot = _register(self, weight, tensors[weight.value])
            self._slots.append(slot)
            memory = _memory(tensors[weight.value])
            if not set(state).isdisjoint(weight.names) and len(memory) and memory.data_ptr() not in kept:
                kept[memory.data_ptr()] = len(self._initial)
                self._initial.append(memory.new_zeros(1).expand_as(memory) if weight.zeros else memory.clone())
        for weight, slot in zip(graph.weights, self._slots, strict=True):
            if (place := _memory(tensors[weight.value]).data_ptr()) in kept:
                self._written.append((slot, kept[place]))
        attach(self, calls, {weight.value: slot for weight, slot in zip(graph.weights, self._slots, strict=True)})

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The stage as fx; the weights are its last inputs."""
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the stage.

        Raises:
            InputError: an input is missing, unknown, or does not fit its recorded type, shape or range.
        """
        bound = bind_inputs(self.graph.inputs, args, kwargs)
        if not torch.compiler.is_compiling():
            check_inputs(self.graph.inputs, bound, self.graph.symbols)
        return self.run(list(bound.values()))

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage on values that are known to fit, in the order of its inputs."""
        moved = [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in values]
        outputs: tuple[Any, ...] = self._held[1](*moved, *(slot.get() for slot in self._slots))
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "TorchStage":
        """A copy with weights of its own."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse to be pickled."""
        raise TypeError(
            "a loaded stage is not pickled: hand on the bundle, or the state_dict, and load the stage there"
        )

    @torch.no_grad()
    def reset_state(self) -> None:
        """Give the buffers that calls write the content that they were loaded with.

        Raises:
            InputError: one of them was replaced by one of another size or type.
        """
        for slot, number in self._written:
            memory = _memory(slot.get())
            if self._initial[number].shape != memory.shape:
                raise InputError(
                    f"{slot.names[0]} was replaced by a buffer of another size or type: it cannot be reset"
                )
            memory.copy_(self._initial[number])

    def fresh_state(self) -> list[torch.Tensor]:
        """Memory for the buffers that calls write, with the content that they were loaded with."""
        return [initial.clone(memory_format=torch.contiguous_format) for initial in self._initial]

    @torch.no_grad()
    def swap_state(self, state: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put other memory, of `fresh_state` or of this method, in the place of what calls write; return the memory that was there.

        The tensors that stand there now are others too: what was handed out of a call keeps the memory of that call.
        """
        held = list(state)
        for slot, number in self._written:
            tensor = slot.get()
            held[number] = _memory(tensor)
            other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            other.set_(state[number].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            slot.put(torch.nn.Parameter(other, tensor.requires_grad) if is_parameter else other)
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTorchStage:
    """A stage that is known to be sound, of whose weights nothing is read yet but where they lie.

    Attributes:
        run: what will run: `module`, or the same compiled.
        cache: what was read of weights, for all stages that are prepared together.
        calls: the calls of the model's modules that it makes, if it runs by them.
    """

    bundle: Bundle
    number: int
    entry: StageEntry
    graph: Graph
    module: torch.fx.GraphModule
    run: torch.nn.Module
    places: Mapping[str, tuple[Path, StoredTensor]]
    device: torch.device
    cache: WeightCache
    calls: Sequence[ModuleCallBody] = ()

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return TorchStage.runtime

    def finish(self, *, verify: bool) -> TorchStage:
        """Read the weights of the stage, and nothing of other stages.

        Raises:
            DigestError: a weight file is not the one listed.
        """
        if verify:
            self.bundle.check_digests(self.entry.weights)
        tensors = {weight.value: self.cache.read(weight, self.places, self.device) for weight in self.graph.weights}
        return TorchStage(self.graph, self.module, self.run, tensors, self.device, self.entry.state, self.calls)


def prepare_stages(
    bundle: Bundle, placement: Mapping[int, torch.device], options: PrepareOptions
) -> dict[int, PreparedTorchStage]:
    """Read and check stages, all but their weights; see `stagepack_loaders.base.Runtime.prepare`.

    Those on one device will share the tensors that are one tensor in the model.

    Raises:
        FormatError: a graph or a weight file breaks rules; `DigestError` when a file is not the one listed.
        OperatorError: an operator is missing here, not allowed, or has another schema.
        DeviceError: a graph names a device that this machine does not have.
    """
    cache = WeightCache()
    return {
        stage_number: _prepare(bundle, stage_number, device, cache, options)
        for stage_number, device in placement.items()
    }


def _prepare(
    bundle: Bundle, stage_number: int, device: torch.device, cache: WeightCache, options: PrepareOptions
) -> PreparedTorchStage:
    """Read all of one stage but its weights: its graph, the operators it needs, the headers of its weight files."""
    entry = bundle.stages[stage_number]
    folded, graph = bundle.graph_file(stage_number, module_calls=options.modules)
    targets = resolve(graph.ops, options.allow_ops, entry.graph)
    if options.dense_inputs:  # a view that was possible may not be; where it is, both are the same
        aten = torch.ops.aten
        targets = [aten.reshape.default if target is aten.view.default else target for target in targets]
    calls: Sequence[ModuleCallBody] = ()
    try:
        if options.modules:
            module, calls = build_modules(graph, entry.node_numbers, targets, device, options.types)
        else:
            module = build(folded, graph, targets, device)
    except (DeviceError, OperatorError) as error:
        raise type(error)(f"{entry.graph}: {error}") from None
    places = bundle.tensors(stage_number, graph)
    return PreparedTorchStage(
        bundle=bundle,
        number=stage_number,
        entry=entry,
        graph=graph,
        module=module,
        run=module,
        places=places,
        device=device,
        cache=cache,
        calls=calls,
    )


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _owner(root: torch.nn.Module, path: Sequence[str]) -> torch.nn.Module:
    """The module of a path, which is made where there is none."""
    for part in path:
        children = child_modules(root)
        if part not in children:
            children[part] = Container()
        root = children[part]  # type: ignore[assignment]
    return root


def _register(root: torch.nn.Module, weight: Weight, tensor: torch.Tensor) -> Slot:
    """Hang a weight into the module under all its names."""
    places = []
    for name in weight.names:
        *path, leaf = name.split(".")
        owner = _owner(root, path)
        held = weight_tensors(owner, parameters=weight.kind == "parameter")
        held[leaf] = tensor
        if weight.kind in ("non_persistent_buffer", "constant"):
            mark_non_persistent(owner, leaf)
        places.append((held, leaf))
    return Slot(weight.names, tuple(places))
