"""A model that is run node by node in the order of the whole graph, on weights read from its files: without stages, regions and plan."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stagepack.format.graph import Argument, ComplexArg, DeviceArg, Graph, Node, Subgraph, SubgraphArg, ValueArg, Weight
from stagepack.format.reader import Bundle
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.torch_attributes import torch_argument, torch_attribute
from stagepack_loaders.torch.weight_store import as_weight


class PlainModel:
    """The whole graph of an entry point with its weights, on the CPU. Its weights keep what calls write."""

    def __init__(self, bundle: Bundle, graph: Graph) -> None:
        self._graph = graph
        self._operators = resolve_operators(graph.ops, (), "whole model")
        file_names = dict.fromkeys(name for stage in bundle.stages for name in stage.weights)
        stored = {
            name: tensor for file_name in file_names for name, tensor in _tensors(bundle.path / file_name).items()
        }
        memories: dict[str, torch.Tensor] = {}
        self._weights = {weight.value: as_weight(weight, _tensor(weight, stored, memories)) for weight in graph.weights}

    def run(self, inputs: Mapping[str, Any], results: Sequence[str]) -> list[Any]:
        values = {**self._weights, **inputs}
        self._run(self._graph.nodes, values)
        return [values[value_name] for value_name in results]

    def _run(self, nodes: Sequence[Node], values: dict[str, Any]) -> None:
        for node in nodes:
            args = [self._argument(argument, values) for argument in node.args]
            kwargs = {name: self._argument(argument, values) for name, argument in node.kwargs}
            with contextlib.ExitStack() as stack:
                for context in self._contexts(node):
                    stack.enter_context(context)
                returned = self._operators[node.op](*args, **kwargs)
            items = returned if node.unpack else [returned]
            values.update(
                (value.name, item) for value, item in zip(node.outputs, items, strict=False) if value is not None
            )

    def _contexts(self, node: Node) -> list[Any]:
        contexts: list[Any] = []
        index = node.context
        while index is not None:
            context = self._graph.contexts[index]
            if context.autocast is None:
                contexts.append(torch.set_grad_enabled(bool(context.grad)))
            else:
                dtype = torch_attribute(context.autocast.dtype, torch.dtype)
                contexts.append(
                    torch.autocast(context.autocast.device or "cpu", dtype, context.autocast.enabled, False)
                )
            index = context.parent
        return contexts[::-1]

    def _argument(self, argument: Argument, values: Mapping[str, Any]) -> Any:
        def leaf(leaf: Argument) -> Any:
            match leaf:
                case ValueArg(name):
                    return values[name]
                case ComplexArg(real, imag):
                    return complex(real, imag)
                case DeviceArg(name):
                    return torch.device(name or "cpu")
                case SubgraphArg(index):
                    return self._function(self._graph.subgraphs[index])
                case _:
                    return leaf

        return torch_argument(argument, leaf)

    def _function(self, subgraph: Subgraph) -> Any:
        def call(*args: Any) -> Any:
            values = {value.name: arg for value, arg in zip(subgraph.inputs, args, strict=True)}
            self._run(subgraph.nodes, values)
            return self._argument(subgraph.result, values)

        return call


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in load_file(path).items()}


def _tensor(weight: Weight, stored: Mapping[str, torch.Tensor], memories: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of a weight; weights on one stored tensor are on one memory."""
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    if weight.zeros:
        tensor = torch.zeros(weight.shape, dtype=dtype)
    elif weight.base is None:
        tensor = stored[weight.stored].clone().view(dtype).reshape(weight.shape)
    if weight.base is not None:
        octets = memories.setdefault(weight.base, stored[weight.base].clone())
        base = octets[: len(octets) - len(octets) % dtype.itemsize].view(dtype)
        return base.as_strided(weight.shape, weight.strides or (), weight.offset)
    if weight.strides is not None:
        tensor = torch.empty_strided(weight.shape, weight.strides, dtype=dtype).copy_(tensor)
    # A view may be on the memory of a weight that is stored itself. Such a weight is row-major, or has no views.
    if weight.strides is None and not weight.zeros:
        octets = memories.setdefault(weight.stored, tensor.reshape(-1).view(torch.uint8))
        return octets.view(dtype).reshape(weight.shape)
    return tensor
