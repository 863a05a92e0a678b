"""The conditions on sizes of a program that was read from a file, which has only their texts, such as ``(L['x'].size()[0] % 4) != 0``."""

import ast
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from stagepack.errors import UnsupportedError
from stagepack.torch_internals import guard_texts, input_paths, symbolic_expression

_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.And: operator.and_,
    ast.Or: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.Not: torch.sym_not,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
    "abs": abs,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": torch.sym_float,
    "torch._sym_sqrt": getattr(torch, "_sym_sqrt", math.sqrt),
}


def conditions_of_texts(program: ExportedProgram) -> Iterator[sympy.Basic]:
    """Yield the conditions of a program that was read from a file, over the symbols of its inputs."""
    condition_texts = guard_texts(program)
    sizes = _sizes_by_source(program) if condition_texts else {}
    for condition_text in condition_texts:
        try:
            condition = _evaluate(ast.parse(condition_text, mode="eval").body, sizes)
        except (KeyError, SyntaxError, TypeError) as error:
            raise UnsupportedError(
                f"the program was captured for sizes with {condition_text}, which a bundle cannot keep: it checks sizes of inputs, and "
                f"cannot read {error}. Change the model so that it does not ask for more than sizes"
            ) from None
        if isinstance(condition, torch.SymBool):
            expression = symbolic_expression(condition)
            # As torch expands a relation in which it replaces symbols: the same program has the same guards.
            yield sympy.expand(expression) if isinstance(expression, sympy.Rel) else expression
        elif not condition:
            yield sympy.false


def _sizes_by_source(program: ExportedProgram) -> dict[str, Any]:
    """The sizes of the inputs by torch's expressions for them."""
    arg_names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT}
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if node.name in arg_names]
    paths_of_inputs = input_paths(program)
    # The names of parameters come last, so that they hold: `x_1` is also a path to the second of `*x`.
    paths = [(f"['flat_args'][{index}]", value) for index, value in enumerate(values)]
    for rank in (1, 0):
        paths += [(own[rank], value) for own, value in zip(paths_of_inputs, values, strict=True) if rank < len(own)]
    sizes: dict[str, Any] = {}
    for path, value in paths:
        source = ast.unparse(ast.parse(f"L{path}", mode="eval"))
        if isinstance(value, torch.Tensor):
            sizes |= {f"{source}.size()[{dimension}]": size for dimension, size in enumerate(value.shape)}
        else:
            sizes[source] = value
    return sizes


def _evaluate(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    """Compute an expression with symbolic sizes, whose arithmetic makes no new condition."""
    source = ast.unparse(node)
    if source in sizes:
        return sizes[source]
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(op, operand):
            return _OPERATORS[type(op)](_evaluate(operand, sizes))
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.BoolOp(op, values):
            return functools.reduce(_OPERATORS[type(op)], (_evaluate(value, sizes) for value in values))
        case ast.Compare(left, [op], [right]):
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.IfExp(test, body, orelse):
            return torch.sym_ite(_evaluate(test, sizes), _evaluate(body, sizes), _evaluate(orelse, sizes))
        case ast.Call(function, args):
            return _FUNCTIONS[ast.unparse(function)](*(_evaluate(argument, sizes) for argument in args))
        case _:
            raise KeyError(source)
