"""The types and shapes that a graph states for its outputs, checked when it has run."""

from collections.abc import Sequence
from typing import Any

import torch

from stagepack.errors import InputError, StageFailedError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph
from stagepack_loaders.torch.torch_attributes import torch_attribute


class OutputContract:
    """Checks the outputs of a graph, given its inputs. Outputs that are weights are not checked: their files are."""

    def __init__(self, graph: Graph) -> None:
        """Collect what the graph states."""
        produced = {value.name: value for node in graph.nodes for value in node.outputs if value is not None}
        self._inputs = graph.inputs
        self._output_names = graph.outputs
        self._values = {value.name: value for value in graph.inputs}
        self._values |= {name: produced[name] for name in graph.outputs if name in produced}
        tensors = [
            (position, produced[name])
            for position, name in enumerate(graph.outputs)
            if name in produced and produced[name].dtype not in SCALAR_DTYPES
        ]
        self._tensors = [
            (position, torch_attribute(value.dtype, torch.dtype), value.shape) for position, value in tensors
        ]
        # An input and its dimension that is the size of a symbol.
        self._symbols = {
            dim: (position, index)
            for position, value in enumerate(graph.inputs)
            for index, dim in enumerate(value.shape)
            if isinstance(dim, str)
        }
        self._is_plain = len(tensors) == len(graph.outputs) and all(
            isinstance(dim, int) or dim in self._symbols for _, value in tensors for dim in value.shape
        )

    def check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check outputs.

        Args:
            inputs: the inputs of the graph, which fit.
            outputs: what it returned for them.

        Raises:
            StageFailedError: an output has another type or shape than the graph states.
        """
        if self._is_plain and self._fit(inputs, outputs):
            return
        values = dict(zip(self._output_names, outputs, strict=True))
        values |= {value.name: given for value, given in zip(self._inputs, inputs, strict=True)}
        bound = {name: BoundArgument(name, values[name]) for name in self._values}
        try:
            check_values(self._values.values(), bound, ())
        except InputError as error:
            raise StageFailedError(f"the stage returns a value that the bundle does not state: {error}") from None

    def _fit(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether all outputs fit, for a graph whose outputs are tensors with sizes that are numbers or those of inputs."""
        for position, dtype, dims in self._tensors:
            output = outputs[position]
            if not isinstance(output, torch.Tensor) or output.dtype is not dtype or len(output.shape) != len(dims):
                return False
            for dim, size in zip(dims, output.shape, strict=True):
                if isinstance(dim, str):
                    input_position, index = self._symbols[dim]
                    dim = inputs[input_position].shape[index]
                if dim != size:
                    return False
        return True
