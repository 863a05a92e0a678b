"""The inputs and outputs of a bundle as a client sees them: named tensors, and a configuration in Triton's format.

Source of the format: ``model_config.proto`` of https://github.com/triton-inference-server/common. `tritonclient` ships the generated code.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.shapes import evaluate_dim
from stagepack.format.tree import result_names
from stagepack_loaders.elements import COMPLEX_DTYPES
from stagepack_serving.protocol.datatypes import protocol_datatype

DYNAMIC_SIZE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceTensor:
    """An input, named as its edge, or an output, named by its path in the model's result, such as ``logits`` or ``output.0``."""

    name: str
    edge: Edge

    @property
    def datatype(self) -> str:
        """The datatype of the protocol, such as ``FP32``."""
        return protocol_datatype(self.edge.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with -1 for a dynamic size.

        A symbolic scalar and a tensor without dimensions have the shape ``(1,)``; a complex tensor has a last dimension of size 2.
        """
        sizes = tuple(dim if isinstance(dim, int) else DYNAMIC_SIZE for dim in self.edge.shape)
        complex_pair = (2,) if self.edge.dtype in COMPLEX_DTYPES else ()
        return (*sizes, *complex_pair) or (1,)

    def byte_count(self, sizes: Mapping[str, int]) -> int:
        """The size of the tensor at sizes of symbols; 0 if it depends on data."""
        try:
            element_count = math.prod(evaluate_dim(dim, sizes) for dim in self.edge.shape)
        except (KeyError, ArithmeticError):
            return 0
        return element_count * ITEM_SIZE.get(self.edge.dtype, 8)

    def edge_shape(self, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Convert the shape of a tensor that a client sends to the shape of the model's value."""
        if self.edge.dtype in COMPLEX_DTYPES:
            if not tensor_shape or tensor_shape[-1] != 2:
                raise InputError(
                    f"{self.name}: a complex number is sent as a pair: expected a last dimension of 2, found {list(tensor_shape)}"
                )
            return tensor_shape[:-1]
        if self.edge.dtype in SCALAR_DTYPES or not self.edge.shape:
            if tensor_shape not in ((), (1,)):
                raise InputError(f"{self.name}: expected one number, shape [1], found shape {list(tensor_shape)}")
            return ()
        return tensor_shape


@dataclass(frozen=True, slots=True)
class _TensorFacts:
    """The shape and dtype of an input, in the form that `check_values` takes."""

    shape: tuple[int, ...]
    dtype: str


class Interface:
    """The inputs and outputs of a bundle by name, in the order of the signature. Constants of the result, such as None, are left out."""

    def __init__(self, entry_point: EntryPoint) -> None:
        self._symbols, self._guards = entry_point.symbols, entry_point.guards
        edges = {edge.name: edge for edge in entry_point.edges}
        # What a call passes to the stages: the inputs, and with adapters the one of each row.
        self.call_edges = {edge.name: edge for edge in entry_point.edges if edge.producer is None}
        self.inputs: Mapping[str, InterfaceTensor] = {
            edge.name: InterfaceTensor(name=edge.name, edge=edge) for edge in entry_point.inputs
        }
        self.outputs: Mapping[str, InterfaceTensor] = {
            output_name: InterfaceTensor(name=output_name, edge=edges[value_name])
            for output_name, value_name in result_names(entry_point.signature.result, self.inputs).items()
        }
        for edge in self.edges:
            protocol_datatype(edge.dtype)

    @property
    def edges(self) -> list[Edge]:
        """The edges of all inputs and outputs."""
        return [tensor.edge for tensor in (*self.inputs.values(), *self.outputs.values())]

    def check_input(self, input_name: str, datatype: str, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Check the name, datatype and number of dimensions of one input."""
        if input_name not in self.inputs:
            raise InputError(f"unknown input {input_name!r}: the model takes {', '.join(self.inputs) or 'none'}")
        tensor = self.inputs[input_name]
        if datatype != tensor.datatype:
            raise InputError(f"{input_name}: expected the datatype {tensor.datatype}, found {datatype}")
        return tensor.edge_shape(tensor_shape)

    def check_inputs(
        self, edge_shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, bool | float]
    ) -> dict[str, int]:
        """Check that every input is present, and that shapes and scalars satisfy the boundary contract."""
        if missing := [input_name for input_name in self.inputs if input_name not in edge_shapes]:
            raise InputError(f"the input {missing[0]!r} is missing: the model takes {', '.join(self.inputs)}")
        edges = [tensor.edge for tensor in self.inputs.values()]
        arguments = {}
        for edge in edges:
            is_scalar = edge.dtype in SCALAR_DTYPES
            value = scalars[edge.name] if is_scalar else _TensorFacts(edge_shapes[edge.name], edge.dtype)
            arguments[edge.name] = BoundArgument(edge.name, value)
        return check_values(edges, arguments, self._symbols, self._guards)

    def scalars(self, arrays: Mapping[str, Any]) -> dict[str, bool | float]:
        """Return the values of the symbolic scalars among arrays."""
        names = (name for name in arrays if name in self.inputs and self.inputs[name].edge.dtype in SCALAR_DTYPES)
        return {name: arrays[name].item() for name in names}

    def output_bytes(self, output_names: Iterable[str], sizes: Mapping[str, int]) -> int:
        """Return the size of outputs together, but for those whose size depends on data."""
        return sum(self.outputs[output_name].byte_count(sizes) for output_name in output_names)

    def check_outputs(self, output_names: Iterable[str]) -> None:
        """Check the names of requested outputs."""
        for output_name in output_names:
            if output_name not in self.outputs:
                raise InputError(
                    f"unknown output {output_name!r}: the model returns {', '.join(self.outputs) or 'none'}"
                )


def build_model_config(
    model_name: str, inputs: Iterable[InterfaceTensor], outputs: Iterable[InterfaceTensor], *, max_batch_size: int
) -> ModelConfig:
    """Build the configuration of a model.

    With a batch size other than 0, the first dimension of all inputs and outputs is the batch dimension, which ``dims`` leave out.
    """
    config = ModelConfig(name=model_name, max_batch_size=max_batch_size)
    for tensors, entries in ((inputs, config.input), (outputs, config.output)):
        for tensor in tensors:
            dims = tensor.shape[1:] if max_batch_size else tensor.shape
            data_type = DataType.Value(f"TYPE_{tensor.datatype}")
            entry = entries.add(name=tensor.name, data_type=data_type, dims=dims or [1])
            if not dims:  # Triton has no tensors without dimensions: it passes one element and reshapes it to ().
                entry.reshape.SetInParent()
    return config
