"""A stage as a module that returns what it writes, as ONNX needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.aliasing import alias_classes
from stagepack.format.graph import Graph
from stagepack.onnx.replacements import call_replaced

# Inputs that torch.export would replace by their value in the example, so they are passed as tensors.
PASSED_AS_TENSORS = {"symfloat": torch.float64, "symbool": torch.bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWrites:
    """The values whose memory a stage writes.

    Attributes:
        state: the values of weights.
        inputs: the inputs of the stage.
    """

    state: Sequence[str]
    inputs: Sequence[str]


def stage_writes(graph: Graph) -> StageWrites:
    """Return the weights and inputs that a stage writes, by the names of their values."""
    classes = alias_classes(graph)
    return StageWrites(
        state=tuple(weight.value for weight in graph.weights if classes.is_written(weight.value)),
        inputs=tuple(value.name for value in graph.inputs if classes.is_written(value.name)),
    )


class FunctionalStage(torch.nn.Module):
    """A stage that returns what it writes instead of writing it.

    Its arguments are a tensor that is not used, the inputs of the stage, and the content of the weights that the stage writes. Its
    results are the outputs of the stage, the next content of these weights, and the content of the inputs that the stage writes. The
    unused tensor is for torch, which cannot trace a module without tensor arguments.
    """

    def __init__(
        self, module: GraphModule, graph: Graph, tensors: Mapping[str, torch.Tensor], writes: StageWrites
    ) -> None:
        super().__init__()
        # A tuple, so that the module is not registered as a child.
        self._stage = (module, graph)
        self._writes = writes
        for value_name, tensor in tensors.items():
            if value_name not in writes.state:
                self.register_buffer(value_name, tensor.detach())

    def forward(self, _: torch.Tensor, *given: Any) -> tuple[Any, ...]:
        """Run the stage."""
        # The parameter keeps its name: torch's exporter derives names of values from it, which are in the ONNX file.
        module, graph = self._stage
        written_names = (*self._writes.state, *self._writes.inputs)
        argument_names = [*(value.name for value in graph.inputs), *self._writes.state]
        values = dict(zip(argument_names, given, strict=True))
        values |= {value_name: values[value_name].clone() for value_name in written_names}
        scalars = {value.name: values[value.name].item() for value in graph.inputs if value.dtype in PASSED_AS_TENSORS}
        stage_inputs = [scalars.get(value.name, values[value.name]) for value in graph.inputs]
        weights = [
            values[weight.value] if weight.value in values else getattr(self, weight.value) for weight in graph.weights
        ]
        with torch.fx.traceback.preserve_node_meta():
            outputs = _StageInterpreter(module).run(*stage_inputs, *weights)
        return (*outputs, *(values[value_name] for value_name in written_names))


class _StageInterpreter(torch.fx.Interpreter):
    """Runs a graph node by node, nodes in contexts too, so that each traced node records the module that it came from."""

    def fetch_attr(self, target: str) -> Any:
        attribute = super().fetch_attr(target)
        is_context = isinstance(attribute, GraphModule) and target.startswith("_context_")
        return (lambda *args: _StageInterpreter(attribute).run(*args)) if is_context else attribute

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or what torch's ONNX exporter converts right in the place of one that it converts wrong."""
        return call_replaced(target, args, kwargs)
