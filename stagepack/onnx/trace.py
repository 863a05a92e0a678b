"""A stage -> a `torch.export.ExportedProgram` that writes nothing and has dynamic sizes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from stagepack.format.aliasing import alias_classes
from stagepack.format.graph import Graph, Value
from stagepack.format.shapes import Expr, Symbol, evaluate_dim
from stagepack.onnx.functional_stage import PASSED_AS_TENSORS, FunctionalStage, StageWrites
from stagepack.torch_internals import OperatorOverload, batch_norm_decompositions, operator_schema


def trace_stage(
    module: GraphModule,
    graph: Graph,
    targets: Sequence[Callable[..., Any]],
    tensors: Mapping[str, torch.Tensor],
    writes: StageWrites,
) -> ExportedProgram:
    """Capture a stage as a `FunctionalStage`, with the sizes that may change."""
    sizes = _traced_sizes(graph.symbols)
    examples = [_example_input(value, sizes) for value in graph.inputs]
    examples += [(tensors[value_name].detach().clone(), None) for value_name in writes.state]
    dynamic_shapes = (None, tuple(dynamic for _, dynamic in examples)) if examples else (None,)
    with torch.no_grad():
        program = torch.export.export(
            FunctionalStage(module, graph, tensors, writes),
            (torch.zeros(()), *(example for example, _ in examples)),
            dynamic_shapes=dynamic_shapes,
            strict=False,
            # The loader checks the sizes, not the graph.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    decompositions = _decompositions(graph, targets)
    return program.run_decompositions(decompositions) if decompositions else program


def _decompositions(graph: Graph, targets: Sequence[Callable[..., Any]]) -> dict[Any, Any]:
    """Decompositions of operators for which torch's ONNX exporter loses what they write, or that their results are views."""
    if not alias_classes(graph).writers:
        return {}
    norms = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}.intersection(targets)
    silent_views = {
        target for op, target in zip(graph.ops, targets, strict=True) if op.aliases and _has_silent_schema(target)
    }
    decompositions: dict[Any, Any] = batch_norm_decompositions() if norms else {}
    if norms or silent_views:
        defaults = torch.export.default_decompositions()
        decompositions |= {target: defaults[target] for target in norms | silent_views if target in defaults}
    return decompositions


def _has_silent_schema(target: Callable[..., Any]) -> bool:
    """Whether the schema of an operator does not say what its results alias."""
    return isinstance(target, OperatorOverload) and not any(
        parameter.alias_info for parameter in operator_schema(target).arguments
    )


def _traced_sizes(symbols: Sequence[Symbol]) -> dict[str, int]:
    """A size for each symbol: that of the example if it is at least 2, since torch takes 0 and 1 for constants."""
    sizes = {}
    for symbol in symbols:
        size = symbol.example if symbol.example is not None and symbol.example > 1 else max(symbol.min or 0, 2)
        sizes[symbol.name] = size if symbol.max is None else min(size, symbol.max)
    return sizes


def _example_input(value: Value, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """An input to trace with, and its dynamic dimensions."""
    if value.dtype == "symint":
        return (2 if value.expr is None else evaluate_dim(value.expr, sizes)), Dim.DYNAMIC
    if value.dtype in PASSED_AS_TENSORS:
        return torch.ones((), dtype=PASSED_AS_TENSORS[value.dtype]), None
    shape = [evaluate_dim(dim, sizes) for dim in value.shape]
    dynamic_dims = {index: Dim.DYNAMIC for index, dim in enumerate(value.shape) if isinstance(dim, str | Expr)}
    return torch.zeros(shape, dtype=getattr(torch, value.dtype)), dynamic_dims
