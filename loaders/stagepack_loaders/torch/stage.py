"""A stage as a `torch.nn.Module`."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch.fx import GraphModule

from stagepack.format.aliasing import alias_classes
from stagepack.format.graph import Graph
from stagepack.format.shapes import Guard
from stagepack.torch_internals import child_modules, write_count
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.exchange import to_runtime
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_loaders.stages import OutputContract, bind_inputs, checked_inputs
from stagepack_loaders.torch.container import Container, Slot, register_weight, set_wait, submodule
from stagepack_loaders.torch.module_builder import ModuleCallBody, called_modules, connect_calls
from stagepack_loaders.torch.stage_memory import StageState
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.window_plan import Residency

if TYPE_CHECKING:
    from stagepack_loaders.torch.adapter_module import AdapterModule

_PARTS = "stagepack.stage"


class StageInputs:
    """The inputs of a stage."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def _written(self) -> dict[int, bool]:
        """The positions of the inputs that the stage may write, and whether torch counts its writes. Only needed where inputs are moved.

        An operator that is a view for some arguments makes it possible: ``mask.to(torch.float32)`` is not one for integers. Norms write
        their statistics uncounted.
        """
        graph, classes = self._graph, alias_classes(self._graph)
        written = {}
        for position, value in enumerate(graph.inputs):
            writers = classes.writers.get(classes.representative(value.name), ())
            if writers:
                written[position] = all(graph.ops[graph.nodes[node_number].op].mutates for node_number in writers)
        return written

    def write_counts(self, values: Sequence[Any], moved_values: Sequence[Any]) -> dict[int, int | None]:
        """Return the moved inputs that the stage may write, by position, with a count of their writes; None if it is not known."""
        moved_positions = {position for position, value in enumerate(values) if moved_values[position] is not value}
        if not moved_positions:
            return {}
        return {
            position: write_count(moved_values[position]) if is_counted else None
            for position, is_counted in self._written.items()
            if position in moved_positions
        }


def write_back(values: Sequence[Any], moved_values: Sequence[Any], counts: Mapping[int, int | None]) -> None:
    """Write what a stage has written into moved inputs into the inputs themselves, as a stage on their device does."""
    for position, count in counts.items():
        if count is None or write_count(moved_values[position]) != count:
            values[position].copy_(moved_values[position])


def move_input(value: Any, device: torch.device) -> Any:
    """Return an input on a device; the same object if it is there, or no tensor.

    To a GPU it goes by page-locked memory: the host does not wait for the work that the device was given before. Also what the caller has
    page-locked is copied first: the caller may write it again when the call returns.
    """
    if not isinstance(value, torch.Tensor):
        return value
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
    if device.type != "cuda" or value.device.type != "cpu" or not is_plain or torch.compiler.is_compiling():
        return value.to(device)
    # `to` gives other strides to what is not dense.
    strides = value.to("meta").stride()
    page_locked = torch.empty_strided(value.size(), strides, dtype=value.dtype, pin_memory=True)
    return page_locked.copy_(value).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """What a stage runs, without its weights.

    Attributes:
        guards: the conditions on sizes of the entry point.
        adapters: what its calls say about adapters.
        graph_module: the graph in torch.fx; it takes the inputs and then the weights.
        compiled_module: the same, compiled, or with questions for the weights (`GatedModule`); None to run `graph_module`.
        module_calls: the calls of the model's modules, if the stage runs by these.
        follows_autocast: whether `torch.autocast` around a call reaches the operators. Outputs have their recorded dtypes in any case.
    """

    stage_number: int
    graph: Graph
    guards: tuple[Guard, ...]
    adapters: AdapterCalls
    graph_module: GraphModule
    compiled_module: torch.nn.Module | None = None
    module_calls: Sequence[ModuleCallBody] = ()
    follows_autocast: bool = False

    @property
    def adapted(self) -> "AdapterModule | None":
        """The compiled module of a stage that takes adapters; None for a stage that takes none."""
        return None if self.adapters.keyword is None else cast("AdapterModule", self.compiled_module)

    @property
    def gated(self) -> GatedModule | None:
        """What asks for the weights of the stage; None if they are there."""
        module = self.compiled_module if self.adapted is None else self.adapted.plain_module
        return module if isinstance(module, GatedModule) else None


class _Mark(NamedTuple):
    """What tells a weight as it was loaded from one that was replaced or written since.

    Attributes:
        tensor: the identity of the tensor.
        address: where its memory begins.
        write_count: how often operators have written the memory.
    """

    tensor: int
    address: int
    write_count: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Mark":
        return cls(id(tensor), tensor.data_ptr(), write_count(tensor))


@dataclass(slots=True, kw_only=True)
class _StageParts:
    """What a stage keeps for itself."""

    code: StageCode
    device: torch.device
    residency: Residency | None
    slots: Sequence[Slot]
    inputs: StageInputs
    output_contract: OutputContract
    state: StageState
    marks: Sequence["_Mark | None"]


def output_contract(graph: Graph) -> OutputContract:
    """Return the check of what a graph returns; of outputs that are weights, the files are checked."""
    produced = {value.name: value for node in graph.nodes for value in node.outputs if value is not None}
    outputs = [produced.get(value_name) for value_name in graph.outputs]
    return OutputContract(graph.inputs, outputs, graph.symbols, lambda dtype: torch_attribute(dtype, torch.dtype))


def _with_dtypes(outputs: tuple[Any, ...], dtypes: Mapping[int, torch.dtype]) -> tuple[Any, ...]:
    """Convert floating-point outputs, which autocast may have computed in another dtype."""
    casts = {position for position, dtype in dtypes.items() if dtype.is_floating_point}
    return tuple(
        output.to(dtypes[position])
        if position in casts and isinstance(output, torch.Tensor) and output.is_floating_point()
        else output
        for position, output in enumerate(outputs)
    )


class TorchStage(Container):
    """One stage of a bundle: called with its inputs, by position or by edge name, it returns a tuple of its outputs.

    Its parameters and buffers have the names that they have in the model, so its `state_dict` is a part of the model's.

    Attributes:
        runtime: ``"torch"``.
    """

    runtime = "torch"

    def __init__(
        self,
        code: StageCode,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        state_names: Collection[str] = (),
        residency: Residency | None = None,
        written_buffers: Collection[str] = (),
    ) -> None:
        super().__init__()
        for path, module in called_modules(code.module_calls):
            *outer_path, module_name = path.split(".")
            child_modules(submodule(self, outer_path))[module_name] = module
        weights, written = code.graph.weights, {*state_names, *written_buffers}
        slots = [register_weight(self, weight, tensors[weight.value]) for weight in weights]
        # In an object, so that no module in it is registered as a child: the names in state_dict are the model's own.
        self.__dict__[_PARTS] = _StageParts(
            code=code,
            device=device,
            residency=residency,
            slots=slots,
            inputs=StageInputs(code.graph),
            output_contract=output_contract(code.graph),
            state=StageState(weights, slots, state_names),
            marks=[
                _Mark.of(slot.get()) if written.isdisjoint(weight.names) else None
                for weight, slot in zip(weights, slots, strict=True)
            ],
        )
        slot_of_value = {weight.value: slot for weight, slot in zip(weights, slots, strict=True)}
        connect_calls(self, code.module_calls, slot_of_value)
        if code.gated is not None:
            gate = code.gated.gate
            set_wait(self, gate.wait, gate.check_conversion)

    @property
    def _parts(self) -> _StageParts:
        parts: _StageParts = self.__dict__[_PARTS]
        return parts

    @property
    def code(self) -> StageCode:
        """What the stage runs, without its weights."""
        return self._parts.code

    @property
    def graph(self) -> Graph:
        """The graph of the stage."""
        return self._parts.code.graph

    @property
    def device(self) -> torch.device:
        """The device of its weights, which its inputs are moved to."""
        return self._parts.device

    @property
    def residency(self) -> Residency | None:
        """With ``device_memory=``, which weights stay in the memory of the device; otherwise None."""
        return self._parts.residency

    @property
    def graph_module(self) -> GraphModule:
        """The stage in torch.fx; its weights are its last inputs."""
        return self._parts.code.graph_module

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the stage.

        Args:
            *args: the inputs, in order. Arrays of numpy are taken as tensors.
            **kwargs: the inputs, by edge name. Of a stage with adapters also ``adapter``: the name of the adapter of all rows, or a list
                with a name or None for each; ``adapter_`` if an input is called ``adapter``.

        Raises:
            InputError: an input is missing, unknown, or does not fit its recorded type, shape or range; or a value of an input is out
                of range for an operator.
            StageFailedError: an operator failed.
        """
        code = self._parts.code
        if torch.compiler.is_compiling() and code.adapters.keyword is None:
            return self.run(list(bind_inputs(self.graph.inputs, args, kwargs).values()))
        inputs = checked_inputs(self.graph.inputs, args, kwargs, self.graph.symbols, code.guards, code.adapters)
        runtime = find_runtime(self.runtime)
        values = [to_runtime(inputs[value.name], value, runtime) for value in self.graph.inputs]
        with typed_stage_errors(code.stage_number):
            return self.run(values)

    def weights(self) -> list[torch.Tensor]:
        """Return the weights as they are now, in the order of the graph's weight table.

        Raises:
            InputError: a weight was removed, or the names of one no longer hold one weight.
        """
        return [slot.get() for slot in self._parts.slots]

    def run(self, values: list[Any], weights: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
        """Run the stage on values that are known to fit; see `stagepack_loaders.base.LoadedStage`.

        Args:
            values: the inputs, in order.
            weights: what `weights` returns, for a caller who has it; None to look it up.

        Raises:
            StageFailedError: an output has another type or shape than the bundle states.
        """
        parts = self._parts
        moved_values = [move_input(value, parts.device) for value in values]
        write_counts = {} if torch.compiler.is_compiling() else parts.inputs.write_counts(values, moved_values)
        compiled_module = parts.code.compiled_module
        module = parts.code.graph_module if compiled_module is None else compiled_module
        arguments = (*moved_values, *(self.weights() if weights is None else weights))
        outputs: tuple[Any, ...]
        # Tensors on `meta`, which only have shapes, know no autocast.
        device_type = "cpu" if parts.device.type == "meta" else parts.device.type
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(device_type)):
            outputs = module(*arguments)
        elif parts.code.follows_autocast:
            outputs = _with_dtypes(module(*arguments), parts.output_contract.dtypes)
        else:
            # The graph states the dtype of each value.
            with torch.autocast("cpu", enabled=False), torch.autocast(device_type, enabled=False):
                outputs = module(*arguments)
        if not torch.compiler.is_compiling():
            parts.output_contract.check(moved_values, outputs)
            write_back(values, moved_values, write_counts)
        return outputs

    def with_code(self, code: StageCode) -> "TorchStage":
        """Return a stage that runs other code on the weights and the state of this one: the same objects."""
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update({**self.__dict__, _PARTS: replace(self._parts, code=code)})
        return duplicate

    def reason_to_stay(self) -> str:
        """Return why `move` is not possible; empty if it is."""
        compiled_module = self._parts.code.compiled_module
        if self.residency is not None:
            return "it has device_memory, and its weights pass through the memory of its device"
        if self._parts.code.adapted is not None:
            return "its adapters are on its device"
        if compiled_module is not None and not isinstance(compiled_module, GatedModule):
            return "it is compiled for its device"
        return "it was loaded with modules=True" if self._parts.code.module_calls else ""

    def reason_to_keep(self) -> str:
        """Return why the stage cannot be replaced by one with other weights; empty if it can."""
        if self.residency is not None:
            return "it has device_memory, and its weights pass through the memory of its device: load the bundle again"
        if self._parts.code.module_calls:
            return "it was loaded with modules=True: load the stage again"
        for slot, is_changed in zip(self._parts.slots, self._changed_weights(), strict=True):
            if is_changed:
                return f"{slot.names[0]} was replaced, written or trained, which would be lost: save the pipeline, or load the bundle again"
        return ""

    def _changed_weights(self) -> list[bool]:
        """For each weight, whether it was replaced, written or trained since it was loaded, but by calls."""
        return [
            mark is not None and (_Mark.of(weight) != mark or weight.grad is not None)
            for weight, mark in zip(self.weights(), self._parts.marks, strict=True)
        ]

    def mark_again(self, changed: Sequence[bool]) -> None:
        """Mark the weights that were not changed as they are now; others stay changed ones."""
        self._parts.marks = [
            mark if mark is None or is_changed else _Mark.of(weight)
            for weight, mark, is_changed in zip(self.weights(), self._parts.marks, changed, strict=True)
        ]

    def weights_by_value(self) -> dict[str, torch.Tensor]:
        """Return the weights as they are now, by the names of their values in the graph."""
        return {weight.value: slot.get() for weight, slot in zip(self.graph.weights, self._parts.slots, strict=True)}

    def state(self) -> list[torch.Tensor]:
        """Return the buffers that calls write."""
        return self._parts.state.tensors()

    def move(self, code: StageCode, device: torch.device, move_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run on another device from now on, with the tensors that `move_tensor` returns in the place of the weights."""
        changed = self._changed_weights()
        for slot in self._parts.slots:
            slot.put(move_tensor(slot.get()))
        self._parts.state.move(device)
        self._parts.code, self._parts.device = code, device
        self.mark_again(changed)

    def reset_state(self) -> None:
        """Set the buffers that calls write to their content at loading.

        Raises:
            InputError: a buffer was replaced by one of another size or type.
        """
        self._parts.state.reset()

    def fresh_state(self) -> list[torch.Tensor]:
        """Return new memory for the buffers that calls write, with its content at loading, for `swap_state`."""
        return self._parts.state.fresh()

    def swap_state(self, state: list[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange the memory that calls write for the memory that `fresh_state` or `swap_state` returned; return the previous memory."""
        return self._parts.state.swap(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TorchStage":
        """Return a copy with weights of its own."""
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        duplicate.mark_again(self._changed_weights())
        return duplicate

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be pickled."""
        raise TypeError(
            "a loaded stage cannot be pickled: pass on the bundle, or the state_dict, and load the stage there"
        )
