"""The conditions on sizes that torch traced a program for -> guards of the format.

A condition that a bundle cannot keep is an error: else the bundle would answer where the program refuses.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import sympy

from stagepack.errors import UnsupportedError
from stagepack.format import limits
from stagepack.format.contract import determined_symbols
from stagepack.format.graph import Value
from stagepack.format.shapes import Dim, Expr, Guard, Symbol
from stagepack.graph.implied_guards import is_implied
from stagepack.linearize.conditions import integer_condition
from stagepack.linearize.symbols import SymbolTable
from stagepack.torch_internals import symbolic_functions

# The relation, and whether its sides are exchanged.
_RELATIONS: Mapping[type, tuple[str, bool]] = {
    sympy.Eq: ("eq", False),
    sympy.Ne: ("ne", False),
    sympy.StrictLessThan: ("lt", False),
    sympy.LessThan: ("le", False),
    sympy.StrictGreaterThan: ("lt", True),
    sympy.GreaterThan: ("le", True),
}
# Sizes of one symbol for which a condition is tried, and intervals of them that one guard has.
_MAX_TRIED_SIZES = 10_000
_MAX_INTERVALS = 64
# Why a bundle cannot keep a condition, and what to do.
_OTHER_THAN_SIZES = (
    "it checks the sizes of inputs, and not their strides or anything else: pass contiguous tensors of their own as the example, or "
    "change the model so that it does not ask for more than sizes"
)
_SEVERAL_DIMENSIONS = "it has no such arithmetic, and lists the sizes of one dimension only: make the others static"
_MANY_SIZES = (
    f"it has no such arithmetic, and lists the sizes of a dimension with at most {_MAX_TRIED_SIZES:,} of them, in at most {_MAX_INTERVALS} "
    "intervals: declare a smaller range, such as Dim.AUTO(min=2, max=64), or make the dimension static"
)


def program_guards(
    conditions: Iterable[sympy.Basic], asserted: Iterable[sympy.Basic], symbols: SymbolTable, inputs: Sequence[Value]
) -> tuple[Guard, ...]:
    """Return conditions as guards, except those that the ranges of symbols imply.

    Those that nodes assert are guards too, where they can be, which every runtime checks before a stage runs.
    """
    builder = _GuardBuilder(symbols, inputs)
    kept = [guard for part in _clauses(map(integer_condition, conditions)) for guard in builder.guards(part)]
    kept += [guard for part in _clauses(asserted) for guard in builder.asserted_guards(part)]
    guards = tuple(dict.fromkeys(kept))
    if len(guards) > limits.GUARDS:
        raise UnsupportedError(
            f"the model was captured for {len(guards)} conditions on sizes, and a bundle keeps at most {limits.GUARDS}: make fewer "
            "dimensions dynamic"
        )
    return guards


def _clauses(conditions: Iterable[sympy.Basic]) -> Iterable[sympy.Basic]:
    return itertools.chain.from_iterable(map(sympy.And.make_args, conditions))


class _GuardBuilder:
    def __init__(self, symbols: SymbolTable, inputs: Sequence[Value]) -> None:
        self._table = symbols
        self._inputs = inputs
        self._checked_names = determined_symbols(inputs, symbols.symbols)

    def guards(self, condition: sympy.Basic) -> list[Guard]:
        """The guards that hold where a condition holds, without those that the ranges imply."""
        if condition == sympy.true or _is_below_a_bound_of_all_sizes(condition):
            return []
        checked_symbols = self._checked_symbols(condition)
        if not checked_symbols:
            raise self._unsupported(condition, _OTHER_THAN_SIZES)
        if _holds_for_all_sizes(condition):
            return []
        guard = self._guard(condition)
        guards = self._tabulated(condition, checked_symbols[0]) if guard is None else [guard]
        return [guard for guard in guards if not is_implied(guard, self._table.symbols)]

    def asserted_guards(self, condition: sympy.Basic) -> list[Guard]:
        """The guard of a condition that a node asserts, if it is one on the sizes of inputs, and the ranges do not imply it."""
        checked_symbols = self._checked_symbols(condition)
        guard = self._guard(condition) if checked_symbols else None
        return [] if guard is None or is_implied(guard, self._table.symbols) else [guard]

    def _checked_symbols(self, condition: sympy.Basic) -> list[Symbol]:
        """The symbols of a condition; none if a reader cannot find the sizes of all."""
        symbols = [self._table.symbol(variable) for variable in condition.free_symbols]
        checked = [symbol for symbol in symbols if symbol is not None and symbol.name in self._checked_names]
        return checked if len(checked) == len(symbols) else []

    def _guard(self, condition: sympy.Basic) -> Guard | None:
        """A condition as a guard; None if the format cannot express it."""
        if isinstance(condition, sympy.And | sympy.Or):
            guards = [guard for guard in map(self._guard, condition.args) if guard is not None]
            return _joined(condition.func, guards) if len(guards) == len(condition.args) else None
        if type(condition) not in _RELATIONS:
            return None
        relation, is_swapped = _RELATIONS[type(condition)]
        lower, upper = condition.args[::-1] if is_swapped else condition.args
        left, right = self._table.expressed(lower), self._table.expressed(upper)
        return None if left is None or right is None else Guard(left=left, relation=relation, right=right)

    def _tabulated(self, condition: sympy.Basic, symbol: Symbol) -> list[Guard]:
        """A condition that the format cannot express, on one symbol, by the intervals of the sizes for which it holds."""
        if len(condition.free_symbols) > 1:
            raise self._unsupported(condition, _SEVERAL_DIMENSIONS)
        if symbol.min is None or symbol.max is None or symbol.max - symbol.min >= _MAX_TRIED_SIZES:
            raise self._unsupported(condition, _MANY_SIZES)
        (variable,) = condition.free_symbols
        holds = [
            size
            for size in range(symbol.min, symbol.max + 1)
            if condition.xreplace({variable: sympy.Integer(size)}) == sympy.true
        ]
        starts = [size for size, before in zip(holds, [None, *holds], strict=False) if before != size - 1]
        ends = [size for size, after in zip(holds, [*holds[1:], None], strict=True) if after != size + 1]
        intervals = [
            [Guard(left=start, relation="le", right=symbol.name), Guard(left=symbol.name, relation="le", right=end)]
            for start, end in zip(starts, ends, strict=True)
        ]
        if not 1 <= len(intervals) <= _MAX_INTERVALS:
            raise self._unsupported(condition, _MANY_SIZES)
        return intervals[0] if len(intervals) == 1 else [_joined(sympy.Or, [_joined(sympy.And, i) for i in intervals])]

    def _unsupported(self, condition: sympy.Basic, reason: str) -> UnsupportedError:
        """The error for a condition: its symbols by the dimensions of inputs."""
        shown = condition.xreplace(
            {variable: sympy.Symbol(self._shown(variable)) for variable in condition.free_symbols}
        )
        return UnsupportedError(f"the model was captured for sizes with {shown}, which a bundle cannot keep: {reason}")

    def _shown(self, variable: sympy.Symbol) -> str:
        """A symbol as the size of the first input that has it, such as ``x.shape[0]``, or as the caller's name of it."""
        symbol = self._table.symbol(variable)
        if symbol is None:
            return re.sub(r"^L\['(\w+)'\]", r"\1", str(variable))
        for value in self._inputs:
            if value.expr == symbol.name:
                return value.name
            if symbol.name in value.shape:
                return f"{value.name}.shape[{value.shape.index(symbol.name)}]"
        return symbol.name


def _is_below_a_bound_of_all_sizes(condition: sympy.Basic) -> bool:
    """Whether a condition says that a size is less than a number that is larger than all sizes, such as 2**63 - 1, or differs from it."""
    relation, is_swapped = _RELATIONS.get(type(condition), ("eq", False))
    return relation != "eq" and _is_beyond_sizes(condition.args[0 if is_swapped else 1])


def _holds_for_all_sizes(condition: sympy.Basic) -> bool:
    """Whether a condition on sizes holds because of a larger number: (n - 1)//2 <= 2**63 - 1 - (n - 1)//2, of padding="same"."""
    relation, is_swapped = _RELATIONS.get(type(condition), ("eq", False))
    if relation == "eq":
        return False
    lower, upper = condition.args[::-1] if is_swapped else condition.args
    distance, rest = (upper - lower).as_coeff_Add()
    return _is_beyond_sizes(distance) and _magnitude(rest) < distance


def _magnitude(expression: sympy.Basic) -> float:
    """A bound of the absolute value of an expression, if all its symbols are sizes."""
    if expression.is_Integer:
        return abs(int(expression))
    if expression.is_Symbol:
        return limits.TENSOR_ELEMENTS
    parts = [_magnitude(part) for part in expression.args]
    if expression.is_Add:
        return sum(parts)
    if expression.is_Mul:
        return math.prod(parts)
    is_floor_division = symbolic_functions().get(type(expression)) == "floordiv" and expression.args[1].is_Integer
    return parts[0] // parts[1] + 1 if is_floor_division else math.inf


def _is_beyond_sizes(bound: sympy.Basic) -> bool:
    return bool(bound.is_Integer) and int(bound) > limits.TENSOR_ELEMENTS


def _joined(connective: type, guards: Sequence[Guard]) -> Guard:
    """The guard that all of some hold, or that one of some does."""
    gaps = Expr(op="max" if connective is sympy.And else "min", args=tuple(map(_gap, guards)))
    return Guard(left=gaps, relation="le", right=0)


def _gap(guard: Guard) -> Dim:
    """How far integers are from satisfying a guard: a number up to 0 if they do."""
    difference = Expr(op="add", args=(guard.left, _negative(guard.right)))
    distance = Expr(op="max", args=(difference, _negative(difference)))
    match guard.relation:
        case "le":
            return difference
        case "lt":
            return Expr(op="add", args=(difference, 1))
        case "eq":
            return distance
        case _:
            return Expr(op="add", args=(_negative(distance), 1))


def _negative(dim: Dim) -> Dim:
    return -dim if isinstance(dim, int) else Expr(op="mul", args=(-1, dim))
