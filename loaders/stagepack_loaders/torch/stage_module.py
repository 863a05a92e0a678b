"""The module of a stage, of a region and of a context: that of fx, with less time for each call of an operator.

The code that fx generates looks an operator up by four attributes, ``torch.ops.aten.mul.Tensor``, and calls it by a method of Python: 0.65
of the 2 µs that a small product takes. What the method calls is here a global variable of the code. A compiler, which cannot trace that,
traces the code of fx.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

from stagepack.torch_internals import function_of_code, untraced_operator

_OPERATOR_CALL: Final = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class StageModule(GraphModule):
    """A module of fx that calls operators directly unless it is traced."""

    def recompile(self) -> PythonCode:
        """Generate the code of the graph again."""
        python_code = super().recompile()
        module_class: Any = type(self)
        # The call of fx prints a traceback beside the error that it raises.
        module_class.__call__ = torch.nn.Module.__call__
        traced: Callable[..., Any] = module_class.forward
        untraced = functools.cache(functools.partial(_untraced_function, python_code))

        @functools.wraps(traced)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (traced if torch.compiler.is_compiling() else untraced())(*args, **kwargs)

        module_class.forward = forward
        return python_code


def _untraced_function(python_code: PythonCode) -> Callable[..., Any]:
    """Return the function of generated code, with global variables in the place of operators."""
    taken_names = set(re.findall(r"\w+", python_code.src))
    operators: dict[str, Callable[..., Any]] = {}

    def variable_of(match: re.Match[str]) -> str:
        namespace, operator_name, overload_name = match.groups()
        overload = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload_name)
        operator = untraced_operator(overload)
        variable_name = "_".join(match.groups())
        while variable_name in taken_names or operators.get(variable_name, operator) is not operator:
            variable_name += "_"
        operators[variable_name] = operator
        return f"{variable_name}("

    source = _OPERATOR_CALL.sub(variable_of, python_code.src)
    return function_of_code(source, python_code.globals | operators)
