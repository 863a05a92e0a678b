"""The module of a stage, of a region and of a context: the module of fx, with less time for each call of an operator.

The code that fx generates looks an operator up by four attributes, ``torch.ops.aten.mul.Tensor``, and calls it by a method of Python: 0.65
of the 2 µs that a small product takes. Here a global variable holds what the method calls. A compiler cannot trace that: it traces the
same code with global variables that hold the operators. The operators of libraries are looked up in each call: their functions are freed
when a library registers other ones.
"""

import re
from types import FunctionType
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

from stagepack.torch_internals import OperatorOverload, permanent_function

_OPERATOR_CALL: Final = re.compile(r"\btorch\.ops\.aten\.(\w+)\.(\w+)\(")


class StageModule(GraphModule):
    """A module of fx that calls operators directly unless it is traced."""

    def recompile(self) -> PythonCode:
        """Generate the code of the graph again."""
        code = _DirectCode(self)
        with self.graph.on_generate_code(lambda _: code.change_lines):
            python_code = super().recompile()
        code.define_variables(_call_as_torch(self).forward)
        return python_code


def module_of_fx(module: GraphModule) -> GraphModule:
    """Return a module with the code of fx. What is compiled compares its global variables in each call, which takes 4 µs for a region."""
    plain_module = GraphModule(module, module.graph)
    _call_as_torch(plain_module)
    return plain_module


def _call_as_torch(module: GraphModule) -> Any:
    """Replace the call of fx, which prints a traceback beside the error that it raises; return the class of the module."""
    module_class: Any = type(module)
    module_class.__call__ = torch.nn.Module.__call__
    return module_class


class _DirectCode:
    """Generated code with global variables for operators, and for itself where these hold their functions."""

    def __init__(self, module: GraphModule) -> None:
        self._parameters = [node.target for node in module.graph.nodes if node.op == "placeholder"]
        self._taken_names = {*self._parameters, *(node.name for node in module.graph.nodes)}
        self._calls: dict[str, str] = {}
        self._operators: dict[str, OperatorOverload] = {}
        self._own_variable = self._free_name("untraced")

    def _free_name(self, word: str) -> str:
        while word in self._taken_names:
            word += "_"
        return word

    def change_lines(self, lines: list[str]) -> list[str]:
        """Change the lines of the function that fx generates."""
        arguments = ", ".join(("self", *self._parameters))
        is_traced = f"{self._own_variable} is None or torch.compiler.is_compiling()"
        first_line = f"if not ({is_traced}): return {self._own_variable}({arguments})\n"
        return [first_line, *(_OPERATOR_CALL.sub(self._variable_call, line) for line in lines)]

    def _variable_call(self, match: re.Match[str]) -> str:
        call = match[0]
        if call not in self._calls:
            self._calls[call] = self._new_call(match)
        return self._calls[call]

    def _new_call(self, match: re.Match[str]) -> str:
        overload = getattr(getattr(torch.ops.aten, match[1]), match[2])
        if permanent_function(overload) is None:
            return match[0]
        variable_name = self._free_name(f"aten_{match[1]}_{match[2]}")
        self._taken_names.add(variable_name)
        self._operators[variable_name] = overload
        return f"{variable_name}("

    def define_variables(self, generated: FunctionType) -> None:
        """Define the global variables of the function."""
        functions = {name: permanent_function(overload) for name, overload in self._operators.items()}
        untraced_globals = {**generated.__globals__, "torch": torch, self._own_variable: None, **functions}
        untraced = FunctionType(generated.__code__, untraced_globals, generated.__name__, generated.__defaults__)
        generated.__globals__.update({"torch": torch, self._own_variable: untraced, **self._operators})
