"""A stage whose graph is interpreted node by node."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagepack.errors import OperatorError
from stagepack.format.graph import Argument, Graph, ListArg, ValueArg
from stagepack.format.reader import Bundle
from stagepack_loaders.callable_stage import CallableStage
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_arrays import numpy_dtype
from stagepack_loaders.numpy_weights import map_stored_tensors, read_weight
from tests.runtimes.numpy_runtime.operators import OPERATORS


class NumpyStage(CallableStage):
    """A stage without state, on the CPU."""

    runtime = "numpy"

    def __init__(self, bundle: Bundle, stage_number: int, graph: Graph, weights: Mapping[str, Array]) -> None:
        super().__init__(bundle, stage_number, "cpu")
        self._graph = graph
        self._weights = weights

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        graph = self._graph
        known = {edge.name: value for edge, value in zip(self.inputs, values, strict=True)}
        known |= {weight.value: self._weights[weight.names[0]] for weight in graph.weights}
        for node in graph.nodes:
            positional = [_argument(argument, known) for argument in node.args]
            keywords = {name: _argument(argument, known) for name, argument in node.kwargs}
            result = OPERATORS[graph.ops[node.op].name](*positional, **keywords)
            for output in node.outputs:
                assert output is not None
                known[output.name] = result.astype(numpy_dtype(output.dtype)) if output.shape else result
        return tuple(known[name] for name in graph.outputs)

    def state_dict(self) -> dict[str, Array]:
        saved = (weight for weight in self._graph.weights if weight.kind in ("parameter", "buffer"))
        return {name: self._weights[weight.names[0]] for weight in saved for name in weight.names}

    def parameters(self) -> Iterator[Array]:
        return (self._weights[weight.names[0]] for weight in self._graph.weights if weight.kind == "parameter")


@dataclass(frozen=True, slots=True)
class PreparedNumpyStage:
    """A stage whose operators are known, and whose weights are not read yet."""

    bundle: Bundle
    stage_number: int
    graph: Graph

    @property
    def runtime(self) -> str:
        return NumpyStage.runtime

    def finish(self, *, verify: bool) -> NumpyStage:
        if verify:
            self.bundle.check_digests(self.bundle.stages[self.stage_number].weights)
        stored = map_stored_tensors(self.bundle, self.stage_number)
        weights = {weight.names[0]: read_weight(weight, stored) for weight in self.graph.weights}
        return NumpyStage(self.bundle, self.stage_number, self.graph, weights)


def prepare_stage(bundle: Bundle, stage_number: int) -> PreparedNumpyStage:
    """Read the graph of a stage and the headers of its weight files, and refuse what the interpreter cannot run."""
    graph = bundle.graph(stage_number)
    unknown = sorted({op.name for op in graph.ops} - OPERATORS.keys())
    if unknown:
        raise OperatorError(f"stage {stage_number}: numpy has no {', '.join(unknown)}: choose another runtime")
    if bundle.stages[stage_number].state:
        raise OperatorError(f"stage {stage_number} writes buffers, which numpy does not: choose another runtime")
    bundle.tensors(stage_number, graph)
    return PreparedNumpyStage(bundle, stage_number, graph)


def _argument(argument: Argument, known: Mapping[str, Any]) -> Any:
    match argument:
        case ValueArg(name):
            return known[name]
        case ListArg(items):
            return [_argument(item, known) for item in items]
        case _:
            return argument
