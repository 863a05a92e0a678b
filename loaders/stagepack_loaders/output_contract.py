"""The types and shapes that a bundle states for the outputs of a stage, checked when it has run, in every runtime."""

from collections.abc import Callable, Sequence
from typing import Any

from stagepack.errors import InputError, StageFailedError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol


class OutputContract:
    """Checks the outputs of a stage, given its inputs."""

    def __init__(
        self,
        inputs: Sequence[Value | Edge],
        outputs: Sequence[Value | Edge | None],
        symbols: Sequence[Symbol],
        dtype_of: Callable[[str], Any] = str,
    ) -> None:
        self._inputs = inputs
        # The other sizes are those of the inputs, which were checked.
        self._symbols_of_data = [symbol for symbol in symbols if symbol.example is None]
        self._outputs = [(position, value) for position, value in enumerate(outputs) if value is not None]
        self._tensors = [
            (position, dtype_of(value.dtype), value.shape)
            for position, value in self._outputs
            if value.dtype not in SCALAR_DTYPES
        ]
        # An input and its dimension that is the size of a symbol.
        self._symbols = {
            dim: (position, index)
            for position, value in enumerate(inputs)
            for index, dim in enumerate(value.shape)
            if isinstance(dim, str)
        }
        self._is_plain = len(self._tensors) == len(outputs) and all(
            isinstance(dim, int) or dim in self._symbols for _, _, dims in self._tensors for dim in dims
        )

    def check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check outputs."""
        if self._is_plain and self._fit(inputs, outputs):
            return
        bound = {
            value.name: BoundArgument(value.name, outputs[position])
            for position, value in self._outputs
            if position < len(outputs)
        }
        bound |= {
            value.name: BoundArgument(value.name, given) for value, given in zip(self._inputs, inputs, strict=True)
        }
        expected = {value.name: value for value in (*self._inputs, *(value for _, value in self._outputs))}
        try:
            check_values(expected.values(), bound, self._symbols_of_data)
        except InputError as error:
            raise StageFailedError(f"the stage returns a value that the bundle does not state: {error}") from None

    def _fit(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether all outputs fit, for a stage whose outputs are tensors with sizes that are numbers or those of inputs."""
        for position, dtype, dims in self._tensors:
            output = outputs[position]
            if getattr(output, "dtype", None) != dtype or len(output.shape) != len(dims):
                return False
            for dim, size in zip(dims, output.shape, strict=True):
                if isinstance(dim, str):
                    input_position, index = self._symbols[dim]
                    dim = inputs[input_position].shape[index]
                if dim != size:
                    return False
        return True
