"""Conditions on sizes in integer arithmetic: torch also compares floats, absolute values and the results of ``torch.sym_ite``."""

import math

import sympy

from stagepack.torch_internals import symbolic_functions

# Up to these, and for sizes under 2**33, torch's arithmetic in float64 is exact, or compares and rounds as fractions do.
_MAX_NUMERATOR = _MAX_DENOMINATOR = 2**20


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
