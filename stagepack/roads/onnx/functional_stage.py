"""A stage as a module that returns what it writes, as ONNX needs it, captured with dynamic sizes; also computed in float64."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from stagepack.format.aliasing import StageWrites, alias_classes, stage_writes
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph, Value
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Expr, Symbol, evaluate_dim
from stagepack.roads.onnx.replacements import call_replaced
from stagepack.torch_internals import OperatorOverload, batch_norm_decompositions, operator_schema
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.weight_store import WeightCache

# Inputs that torch.export would replace by their value in the example, so they are passed as tensors.
PASSED_AS_TENSORS = {"symfloat": torch.float64, "symbool": torch.bool}
_CPU = torch.device("cpu")
_WIDE_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class FunctionalStage(torch.nn.Module):
    """A stage that returns what it writes instead of writing it.

    Its arguments are a tensor that is not used, since torch cannot trace a module without any, the inputs, and the content of the weights
    that the stage writes. Its results are the outputs, and the next content of these weights and of the inputs that the stage writes.
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


def float64_answers(
    bundle: Bundle, stage_number: int, inputs: Sequence[Any], allow_ops: Collection[str]
) -> dict[str, torch.Tensor]:
    """Run a stage in float64, also where its graph names a lower precision; return its outputs, or nothing if it cannot run so."""
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
