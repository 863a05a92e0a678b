"""The conditions on sizes that torch traced a program for, in integer arithmetic.

torch also compares floats, absolute values and the results of ``torch.sym_ite``. A program that was read from a file has only the texts of
its conditions, such as ``(L['x'].size()[0] % 4) != 0``.
"""

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
from stagepack.torch_internals import (
    guard_texts,
    input_paths,
    symbolic_expression,
    symbolic_functions,
    traced_conditions,
)

# Up to these, and for sizes under 2**33, torch's arithmetic in float64 is exact, or compares and rounds as fractions do.
_MAX_NUMERATOR = _MAX_DENOMINATOR = 2**20
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


def program_conditions(program: ExportedProgram) -> tuple[sympy.Basic, ...]:
    """Return the conditions on sizes that a program was traced for, over torch's symbols of its inputs."""
    conditions = traced_conditions(program)
    return tuple(conditions_of_texts(program) if conditions is None else conditions)


class _InexactError(Exception):
    """The result of float arithmetic may differ from that of fractions."""


def integer_condition(condition: sympy.Basic) -> sympy.Basic:
    """Return a condition without negation, with integers in the place of floats, as far as float arithmetic on sizes is exact."""
    pieces = sorted(condition.atoms(sympy.Piecewise), key=lambda piece: len(piece.args))
    if pieces:
        return integer_condition(_by_cases(condition, pieces[0]))
    condition = sympy.to_nnf(condition, simplify=False)
    if isinstance(condition, sympy.And | sympy.Or):
        return condition.func(*map(integer_condition, condition.args))
    if not isinstance(condition, sympy.Rel):
        return condition
    try:
        (left, left_divisor), (right, right_divisor) = (_fraction(_exact(side)) for side in condition.args)
    except _InexactError:
        return condition
    sides = left * right_divisor, right * left_divisor
    return condition if sides == condition.args else condition.func(*sides)


def _by_cases(condition: sympy.Basic, piecewise: sympy.Piecewise) -> sympy.Basic:
    """A condition with each value of one expression by cases in its place, where the test of the value decides."""
    cases = []
    remaining = sympy.true
    for value, test in piecewise.args:
        cases.append(sympy.And(remaining, test, condition.xreplace({piecewise: value})))
        remaining = sympy.And(remaining, sympy.Not(test))
    return sympy.Or(*cases)


def _exact(expression: sympy.Expr) -> sympy.Expr:
    """A side of a relation, or what is rounded to an integer, as a fraction: it may be one inexact division of exact operands."""
    if type(expression).__name__ in ("IntTrueDiv", "FloatTrueDiv"):
        dividend, divisor = map(_exact_operand, expression.args)
        if not divisor.is_Rational or divisor <= 0:
            raise _InexactError
        return dividend / divisor
    return _exact_operand(expression)


def _exact_operand(expression: sympy.Expr) -> sympy.Expr:
    """An expression as a fraction that float64 holds exactly."""
    if expression.is_Integer or expression.is_Symbol:
        return expression
    if expression.is_Float:
        number = sympy.Rational(float(expression))
        if abs(number.p) > _MAX_NUMERATOR or number.q > _MAX_DENOMINATOR:
            raise _InexactError
        return number
    kind = type(expression).__name__
    if kind in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return _rounded(_exact(expression.args[0]), kind)
    if kind in ("IntTrueDiv", "FloatTrueDiv") and not _is_power_of_two(expression.args[1]):
        raise _InexactError
    args = [_exact(arg) if kind == "ToFloat" else _exact_operand(arg) for arg in expression.args]
    if kind == "ToFloat":
        return args[0]
    if kind in ("IntTrueDiv", "FloatTrueDiv"):
        return args[0] / args[1]
    if isinstance(expression, sympy.Abs):
        return sympy.Max(args[0], -args[0])
    if not isinstance(expression, sympy.Add | sympy.Mul) and (
        type(expression) not in symbolic_functions()
        or any(arg.atoms(sympy.Rational) - arg.atoms(sympy.Integer) for arg in args)
    ):
        raise _InexactError
    return expression.func(*args)


def _rounded(quotient: sympy.Expr, kind: str) -> sympy.Expr:
    floor_division = next(function for function, operation in symbolic_functions().items() if operation == "floordiv")
    dividend, divisor = _fraction(quotient)
    if kind == "CeilToInt":
        return -floor_division(-dividend, divisor)
    if kind == "TruncToInt" and not dividend.is_nonnegative:
        raise _InexactError
    return floor_division(dividend, divisor)


def _fraction(expression: sympy.Expr) -> tuple[sympy.Expr, sympy.Integer]:
    """A sum of fractions as one dividend of integers and one divisor."""
    divisor = math.lcm(*[rational.q for rational in expression.atoms(sympy.Rational)])
    return sympy.expand(expression * divisor), sympy.Integer(divisor)


def _is_power_of_two(divisor: sympy.Expr) -> bool:
    return bool(divisor.is_number) and math.frexp(float(divisor))[0] == 0.5


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
