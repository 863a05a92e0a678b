"""A stage whose graph is interpreted node by node."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_interpreter import map_stored_tensors, read_weight, refuse_unsupported, run_nodes
from stagepack_loaders.pipeline import CallableStage
from tests.runtimes.numpy_runtime.operators import OPERATORS


class NumpyStage(CallableStage):
    """A stage without state, on the CPU."""

    runtime = "numpy"

    def __init__(self, bundle: Bundle, stage_number: int, graph: Graph, weights: dict[str, Array]) -> None:
        super().__init__(bundle, stage_number, "cpu")
        self._graph = graph
        self._weights = weights

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        inputs = {edge.name: value for edge, value in zip(self.inputs, values, strict=True)}
        return run_nodes(self._graph, OPERATORS, inputs | self._weights)

    def state_dict(self) -> dict[str, Array]:
        saved = (weight for weight in self._graph.weights if weight.kind in ("parameter", "buffer"))
        return {name: self._weights[weight.value] for weight in saved for name in weight.names}

    def parameters(self) -> Iterator[Array]:
        return (self._weights[weight.value] for weight in self._graph.weights if weight.kind == "parameter")


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
        stored = map_stored_tensors(self.bundle, self.stage_number, verify=verify)
        weights = {weight.value: read_weight(weight, stored) for weight in self.graph.weights}
        return NumpyStage(self.bundle, self.stage_number, self.graph, weights)


def prepare_stage(bundle: Bundle, stage_number: int) -> PreparedNumpyStage:
    """Read the graph of a stage and the headers of its weight files, and refuse what the interpreter cannot run."""
    graph = bundle.graph(stage_number)
    refuse_unsupported(bundle, stage_number, graph, OPERATORS, "numpy")
    bundle.tensors(stage_number, graph)
    return PreparedNumpyStage(bundle, stage_number, graph)
