"""Run a captured program node by node: for its answer, and to find the module where it parts from its model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.nn.modules.module import register_module_forward_hook

from stagepack.capture.inputs import Inputs
from stagepack.capture.model_runs import run_model
from stagepack.errors import CaptureError
from stagepack.torch_internals import tree_leaves

# How far values of a model and of its program may be from each other before a module counts as the first that differs.
_RTOL, _ATOL = 1e-3, 1e-4


def run_program_nodes(
    program: ExportedProgram,
    values: Sequence[Any],
    weights: Mapping[str, torch.Tensor],
    interpreter: fx.Interpreter,
) -> list[Any]:
    """Run the nodes of a captured program one by one, on the values of its inputs in order; return the leaves of its answer.

    ``program.module()`` of torch checks the sizes of inputs, and writes Python code, which is not valid where a module or an argument is
    named ``class``. Tensors that are not among the weights come from the program.

    interpreter: runs the graph module of the program.
    """
    remaining = iter(values)
    arguments = [_argument(program, spec, remaining, weights) for spec in program.graph_signature.input_specs]
    results = interpreter.run(*arguments, enable_io_processing=False)
    specs = program.graph_signature.output_specs
    return [result for result, spec in zip(results, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT]


def _argument(program: ExportedProgram, spec: Any, values: Iterator[Any], weights: Mapping[str, torch.Tensor]) -> Any:
    if spec.kind == InputKind.TOKEN:
        return torch.empty(0)
    if spec.kind == InputKind.USER_INPUT:
        return spec.arg.value if isinstance(spec.arg, ConstantArgument) else next(values)
    for tensors in (weights, program.state_dict, program.constants):
        if spec.target in tensors:
            return tensors[spec.target]
    raise CaptureError(f"the captured program has no tensor for its input {spec.target!r}")


class InterpretedProgram(torch.nn.Module):
    """Runs a captured program as `run_program_nodes` does."""

    def __init__(
        self,
        program: ExportedProgram,
        weights: Mapping[str, torch.Tensor] | None = None,
        interpreter: fx.Interpreter | None = None,
    ) -> None:
        super().__init__()
        self._program = (program,)  # not as an attribute: it holds graph modules
        self._weights = dict(weights or {})
        self._interpreter = interpreter or fx.Interpreter(program.graph_module)

    def forward(self, *values: Any) -> list[Any]:
        """Run the program."""
        return run_program_nodes(*self._program, values, self._weights, self._interpreter)


class _ModuleCall(NamedTuple):
    """A call of a module of the model, and the tensors that it returned."""

    path: str
    type: str
    results: tuple[torch.Tensor, ...]


def diverging_module(model: torch.nn.Module, program: ExportedProgram, inputs: Inputs, values: Sequence[Any]) -> str:
    """Return the first module whose result is among no values of the captured program, such as ``layers.0 (TransformerEncoderLayer)``."""
    calls = _module_calls(model, inputs)
    traced_paths = {path for node in program.graph.nodes for path in _module_paths(node)}
    differing = {index: call for index, call in enumerate(calls) if call.path in traced_paths}

    class Comparison(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            paths = set(_module_paths(n))
            found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for index, call in list(differing.items()):
                if call.path in paths and any(
                    _are_close(expected, leaf) for expected in call.results for leaf in found
                ):
                    del differing[index]
            return result

    weights = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    run = InterpretedProgram(program, weights, Comparison(program.graph_module))
    run_model(run, Inputs(args=tuple(values)), written=weights.values())
    first = next(iter(differing.values()), None)
    return "" if first is None else f"{first.path or 'the model itself'} ({first.type})"


def _module_calls(model: torch.nn.Module, inputs: Inputs) -> list[_ModuleCall]:
    """The calls of modules when the model runs its example, in the order in which they return."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: list[_ModuleCall] = []

    def record(module: torch.nn.Module, args: Any, result: Any) -> None:
        passed = {id(leaf) for leaf in tree_leaves(args)}
        results = tuple(
            leaf.detach().clone() if _is_dense(leaf) else leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and id(leaf) not in passed
        )
        if id(module) in paths and results:
            calls.append(_ModuleCall(paths[id(module)], type(module).__name__, results))

    # A hook of all modules: modules of torch such as TransformerEncoderLayer take another path where they have a hook of their own.
    handle = register_module_forward_hook(record)
    try:
        run_model(model, inputs)
    finally:
        handle.remove()
    return calls


def _module_paths(node: fx.Node) -> Iterator[str]:
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        yield path


def _are_close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if not (_is_dense(expected) and _is_dense(found)):
        return False
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, found)
    return torch.allclose(expected, found, rtol=_RTOL, atol=_ATOL, equal_nan=True)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
