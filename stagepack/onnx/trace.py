"""A stage -> an `ExportedProgram` that writes nothing: what it would write it gives back, as ONNX needs it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from stagepack.format.graph import Graph, Value
from stagepack.format.shapes import Expr, Symbol, evaluate_dim
from stagepack.graph.aliasing import alias_classes

# The inputs that torch does not take as what they are: torch.export fixes their values, so they come as tensors.
_AS_TENSORS = {"symfloat": torch.float64, "symbool": torch.bool}


_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a stage writes, by the names of values: `state` are weights, `inputs` its inputs."""

    state: Sequence[str]
    inputs: Sequence[str]


class _Pure(torch.nn.Module):
    """A stage that gives back what it writes instead of writing it.

    It takes a tensor that is not used, then the inputs of the stage, then the content of the weights that the stage writes. It gives the
    outputs of the stage, the next content of these weights, and what the stage writes into its inputs. The tensor is there for
    torch, which does not trace a module that no tensor comes into.
    """

    def __init__(
        self, module: GraphModule, graph: Graph, tensors: Mapping[str, torch.Tensor], written: Written
    ) -> None:
        super().__init__()
        self._held = (module, graph)
        self._written = written
        for name, tensor in tensors.items():
            if name not in written.state:
                self.register_buffer(name, tensor.detach())

    def forward(self, _: torch.Tensor, *given: Any) -> tuple[Any, ...]:
        module, graph = self._held
        changed = (*self._written.state, *self._written.inputs)
        names = [*(value.name for value in graph.inputs), *self._written.state]
        values = dict(zip(names, given, strict=True))
        values |= {name: values[name].clone() for name in changed}
        numbers = {value.name: values[value.name].item() for value in graph.inputs if value.dtype in _AS_TENSORS}
        taken = [{**values, **numbers}[value.name] for value in graph.inputs]
        taken += [values[w.value] if w.value in values else getattr(self, w.value) for w in graph.weights]
        with torch.fx.traceback.preserve_node_meta():
            results = _Run(module).run(*taken)
        return (*results, *(values[name] for name in changed))


class _Run(torch.fx.Interpreter):
    """Runs a graph node by node, contexts too, so that each node of what is traced tells the module that it came from."""

    def fetch_attr(self, target: str) -> Any:
        held = super().fetch_attr(target)
        is_context = isinstance(held, GraphModule) and target.startswith("_context_")
        return (lambda *args: _Run(held).run(*args)) if is_context else held

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; where torch's exporter means something else by it, in a way that it gets right."""
        if target in _DROPOUTS:
            given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            if not given["train"]:  # gives its input back; what is traced would lose that
                return given["input"]
        result = super().call_function(target, args, kwargs)
        if target is torch.ops.aten.scaled_dot_product_attention.default:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None:  # of a row that sees nothing torch gives 0, the exporter the mean of all, or NaN
                seen = mask if mask.dtype == torch.bool else mask > -math.inf
                return torch.where(seen.any(-1, keepdim=True), result, torch.zeros((), dtype=result.dtype))
        return result


def trace(
    module: GraphModule,
    graph: Graph,
    targets: Sequence[Callable[..., Any]],
    tensors: Mapping[str, torch.Tensor],
    written: Written,
) -> ExportedProgram:
    """Export a stage, with the sizes that may change.

    Args:
        module: the stage, without regions.
        graph: the same as data.
        targets: the operators of its op table.
        tensors: the weights by the names of their values. They become buffers of these names; their data is not read.
        written: what the stage writes.

    Raises:
        torch._dynamo.exc.UserError, RuntimeError and others: ``torch.export`` does not take it.
    """
    sizes = _sizes(graph.symbols)
    given = [_example(value, sizes) for value in graph.inputs]
    given += [(tensors[name].detach().clone(), None) for name in written.state]
    shapes = (None, tuple(dynamic for _, dynamic in given)) if given else (None,)
    with torch.no_grad():
        program = torch.export.export(
            _Pure(module, graph, tensors, written),
            (torch.zeros(()), *(example for example, _ in given)),
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # the loader checks the sizes, not the graph
        )
    wrong = _decompositions(graph, targets)
    return program.run_decompositions(wrong) if wrong else program


def _decompositions(graph: Graph, targets: Sequence[Callable[..., Any]]) -> dict[Any, Any]:
    """What must be taken apart first: torch's exporter loses what these write, or that they give back the memory of an input."""
    if not alias_classes(graph).writers:
        return {}
    aten = torch.ops.aten
    norms = {aten.batch_norm.default, aten.instance_norm.default}.intersection(targets)
    silent = {target for op, target in zip(graph.ops, targets, strict=True) if op.aliases and _says_nothing(target)}
    table: dict[Any, Any] = {}
    if norms:
        table |= torch._decomp.get_decompositions([aten._native_batch_norm_legit_functional.default])
    if norms or silent:
        known = torch.export.default_decompositions()
        table |= {target: known[target] for target in norms | silent if target in known}
    return table


def _says_nothing(target: Callable[..., Any]) -> bool:
    """Whether the schema of an operator keeps silent on what its results alias."""
    return isinstance(target, torch._ops.OpOverload) and not any(
        argument.alias_info for argument in target._schema.arguments
    )


def _sizes(symbols: Sequence[Symbol]) -> dict[str, int]:
    """A size for each symbol: that of the example, where it is larger than 1; torch takes 0 and 1 for fixed ones."""
    sizes = {}
    for symbol in symbols:
        size = symbol.example if symbol.example is not None and symbol.example > 1 else max(symbol.min or 0, 2)
        sizes[symbol.name] = size if symbol.max is None else min(size, symbol.max)
    return sizes


def _example(value: Value, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """A value to trace with, and which of its sizes may change."""
    if value.dtype == "symint":
        return (2 if value.expr is None else evaluate_dim(value.expr, sizes)), Dim.DYNAMIC
    if value.dtype in _AS_TENSORS:
        return torch.ones((), dtype=_AS_TENSORS[value.dtype]), None
    example = torch.zeros([evaluate_dim(dim, sizes) for dim in value.shape], dtype=getattr(torch, value.dtype))
    return example, {place: Dim.DYNAMIC for place, dim in enumerate(value.shape) if isinstance(dim, str | Expr)}
