"""The module of a stage, of a region and of a context: fx, with less time for each call of an operator.

The code that fx generates looks an operator up by four attributes, ``torch.ops.aten.mul.Tensor``, and calls it by a method of Python: 0.65
of the 2 µs that a small product takes. Here the code names it by a global variable. That is what the method calls; while a compiler
traces, which does not know that, it is the operator.
"""

import functools
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

from stagepack.torch_internals import OperatorOverload, untraced_operator

_OPERATOR_CALL: Final = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class StageModule(GraphModule):
    """A module of fx whose `forward` calls operators by global variables."""

    def recompile(self) -> PythonCode:
        """Generate the code of the graph again."""
        operator_globals = _OperatorGlobals({node.name for node in self.graph.nodes})
        with self.graph.on_generate_code(lambda _: operator_globals.name_operators):
            python_code = super().recompile()
        module_class: Any = type(self)
        module_class.forward = operator_globals.forward_of(module_class.forward)
        # The call of fx prints a traceback beside the error that it raises.
        module_class.__call__ = torch.nn.Module.__call__
        return python_code


class _OperatorGlobals:
    """The global variables of generated code that hold operators."""

    def __init__(self, taken_names: set[str]) -> None:
        self._taken_names = taken_names
        self._names: dict[OperatorOverload, str] = {}

    def name_operators(self, lines: list[str]) -> list[str]:
        """Return lines of code in which global variables take the place of operators."""
        return [_OPERATOR_CALL.sub(self._name_operator, line) for line in lines]

    def _name_operator(self, match: re.Match[str]) -> str:
        namespace, operator_name, overload_name = match.groups()
        overload = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload_name)
        if overload not in self._names:
            variable_name = "_".join(match.groups())
            while variable_name in self._taken_names:
                variable_name += "_"
            self._taken_names.add(variable_name)
            self._names[overload] = variable_name
        return f"{self._names[overload]}("

    def forward_of(self, generated: FunctionType) -> Callable[..., Any]:
        """Return the function of generated code that compilers trace and others call."""
        generated.__globals__.update({variable_name: overload for overload, variable_name in self._names.items()})
        untraced_globals = generated.__globals__ | {
            variable_name: untraced_operator(overload) for overload, variable_name in self._names.items()
        }
        untraced = FunctionType(generated.__code__, untraced_globals, generated.__name__, generated.__defaults__)

        @functools.wraps(generated)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (generated if torch.compiler.is_compiling() else untraced)(*args, **kwargs)

        return forward
