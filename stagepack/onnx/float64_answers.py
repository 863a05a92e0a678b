"""A stage computed in float64: the answers against which the rounding of lower precisions is measured."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from stagepack.format.reader import Bundle
from stagepack.format.unfold import trivially_folded
from stagepack.onnx.functional_stage import stage_writes
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.weights import WeightCache

_CPU = torch.device("cpu")
_WIDE_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def float64_answers(
    bundle: Bundle, stage_number: int, inputs: Sequence[Any], allow_ops: Collection[str]
) -> dict[str, torch.Tensor]:
    """Run a stage in float64, also where its graph names a lower precision.

    The result is the outputs by the names of their edges; nothing if the stage cannot run in float64, for example because an operator has
        no kernel for it.
    """
    graph = bundle.graph(stage_number)
    module = build_graph_module(
        trivially_folded(graph), graph, resolve_operators(graph.ops, allow_ops, bundle.stages[stage_number].graph), _CPU
    )
    _widen_graphs(module)
    stored_tensors, cache, written = bundle.tensors(stage_number, graph), WeightCache(), stage_writes(graph)
    weights = [_widened(cache.read(weight, stored_tensors, _CPU)) for weight in graph.weights]
    # What the stage writes, it writes into copies.
    weights = [
        tensor.clone() if weight.value in written.state else tensor
        for weight, tensor in zip(graph.weights, weights, strict=True)
    ]
    copied_inputs = [_widened(value.clone()) if isinstance(value, torch.Tensor) else value for value in inputs]
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = module(*copied_inputs, *weights)
    except Exception:  # noqa: BLE001 - operators raise any class
        return {}
    finally:
        torch.set_default_dtype(default_dtype)
    return {
        edge_name: answer
        for edge_name, answer in zip(bundle.stages[stage_number].outputs, outputs, strict=True)
        if isinstance(answer, torch.Tensor)
    }


def rounding_error(exact_answers: Mapping[str, torch.Tensor], edge_name: str, answer: torch.Tensor) -> float | None:
    """Return the largest absolute difference of an answer of a stage from that in float64."""
    if edge_name not in exact_answers or answer.dtype not in _WIDE_DTYPES:
        return None
    error, _ = TORCH_ARRAYS.difference(answer.to(_WIDE_DTYPES[answer.dtype]), exact_answers[edge_name], 0.0, 0.0)
    return error if math.isfinite(error) else None


def _widen_graphs(module: GraphModule) -> None:
    """Replace the dtypes in the arguments of all nodes."""
    for nested in module.modules():
        if not isinstance(nested, GraphModule):
            continue
        for node in nested.graph.nodes:
            node.args = map_aggregate(node.args, _wide_dtype)
            node.kwargs = map_aggregate(node.kwargs, _wide_dtype)
        nested.recompile()


def _wide_dtype(argument: Any) -> Any:
    return _WIDE_DTYPES.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _widened(value: Any) -> Any:
    return value.to(_wide_dtype(value.dtype)) if isinstance(value, torch.Tensor) else value
