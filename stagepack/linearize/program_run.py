"""Run a captured program node by node, at sizes other than those of its example."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode

from stagepack.argument_guards import guarded_operator
from stagepack.linearize.contexts import context_module_position, opens_context
from stagepack.torch_internals import OperatorOverload

# Called with each node that calls an operator, and what the operator returned.
Record = Callable[[FxNode, Any], None]

# In the place of the result of a node that cannot run on tensors without data, or that uses such a result.
_UNKNOWN: Final = object()


class UnsafeArgumentsError(Exception):
    """An operator would end the process with its arguments."""


def run_program(
    program: ExportedProgram,
    weights: Mapping[str, torch.Tensor],
    leaves: Sequence[Any],
    *,
    record: Record,
    skip_failing: bool = False,
) -> list[Any]:
    """Run a captured program, without its guards on the sizes of inputs.

    Not by ``program.module()``: this one has the name of each node, and needs no Python code made of names of the model.
    """
    arguments, remaining = [], iter(leaves)
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            arguments.append(next(remaining))
        else:
            arguments.append(weights.get(str(spec.target), torch.empty(0)))
    results = _RecordingInterpreter(program.graph_module, record, skip_failing=skip_failing).run(*arguments)
    specs = program.graph_signature.output_specs
    return [result for result, spec in zip(results, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT]


class _RecordingInterpreter(Interpreter):
    """Runs a graph module, and those that it calls under another grad mode or autocast."""

    def __init__(self, module: GraphModule, record: Record, *, skip_failing: bool) -> None:
        super().__init__(module)
        self._record = record
        self._skip_failing = skip_failing

    def run_node(self, n: FxNode) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self._skip_failing and any(self.env[used] is _UNKNOWN for used in n.all_input_nodes):
            return _UNKNOWN
        try:
            result = self._run_in_context(n) if opens_context(n) else super().run_node(n)
            if result is not _UNKNOWN:
                self._record(n, result)
        except Exception:
            if not self._skip_failing:
                raise
            return _UNKNOWN
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Checks may look at data, which tensors that may be left out do not have.
        if self._skip_failing or not isinstance(target, OperatorOverload) or guarded_operator(target) is target:
            return super().call_function(target, args, kwargs)
        try:
            return guarded_operator(target)(*args, **kwargs)
        except ValueError as error:
            raise UnsafeArgumentsError(f"{target}: {error}") from error

    def _run_in_context(self, node: FxNode) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        position = context_module_position(node)
        called = _RecordingInterpreter(args[position], self._record, skip_failing=self._skip_failing)
        args = (*args[:position], lambda *inputs: called.run(*inputs), *args[position + 1 :])
        return node.target(*args, **kwargs)  # type: ignore[operator]
