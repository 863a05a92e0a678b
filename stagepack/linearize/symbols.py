"""Symbolic sizes of torch (sympy) -> symbols and dimensions of the format."""

from collections.abc import Mapping

import sympy
import torch

from stagepack.format.shapes import Dim, Expr, Guard, Symbol, guard_holds, symbol_names
from stagepack.format.validate import is_identifier
from stagepack.torch_internals import symbolic_expression, symbolic_functions

_OPERATIONS: Mapping[type, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    sympy.Max: "max",
    sympy.Min: "min",
    **symbolic_functions(),
}
# The relation, and whether its sides are exchanged.
_RELATIONS: Mapping[type, tuple[str, bool]] = {
    sympy.Eq: ("eq", False),
    sympy.Ne: ("ne", False),
    sympy.StrictLessThan: ("lt", False),
    sympy.LessThan: ("le", False),
    sympy.StrictGreaterThan: ("lt", True),
    sympy.GreaterThan: ("le", True),
}
_MAX_TRIED_SIZES = 10_000
_MAX_BOUND = 2**62  # torch's infinities are larger


class SymbolTable:
    """The symbols of one program. A symbol has the name of the caller's ``Dim``, else ``s0``, ``s1`` ... by first use."""

    def __init__(
        self,
        ranges: Mapping[sympy.Symbol, object],
        dim_names: Mapping[str, str],
        example_values: Mapping[sympy.Symbol, sympy.Integer],
    ) -> None:
        """Start an empty table.

        Args:
            ranges: torch's value range of each symbol.
            dim_names: the caller's name of each symbol, by the name that torch gives it.
            example_values: the value of each symbol in the example.
        """
        self._ranges = ranges
        self._dim_names = dim_names
        self._example_values = example_values
        self._symbols: dict[sympy.Expr, Symbol] = {}

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols that were used so far, in the order of their first use."""
        return tuple(self._symbols.values())

    def has_symbols(self, condition: sympy.Basic) -> bool:
        """Return whether a condition has symbols, and all of them were used so far."""
        return bool(condition.free_symbols) and all(symbol in self._symbols for symbol in condition.free_symbols)

    def dim(self, size: "int | torch.SymInt") -> Dim:
        """Return a size as a dimension.

        Args:
            size: a size of a tensor of the program.

        Returns:
            The dimension. Arithmetic that the format cannot express becomes a symbol of its own, without bounds.
        """
        return size if isinstance(size, int) else self._dim(symbolic_expression(size))

    def exact_dim(self, size: "torch.SymInt") -> Dim | None:
        """Return a symbolic integer as a dimension; None if the format cannot express its arithmetic."""
        expression = symbolic_expression(size)
        return self._dim(expression) if self._is_expressible(expression) else None

    def guard(self, condition: sympy.Basic) -> Guard | None:
        """Return a relation of torch's symbols as a condition; None if the format cannot express it."""
        if type(condition) not in _RELATIONS:
            return None
        relation, is_swapped = _RELATIONS[type(condition)]
        left, right = reversed(condition.args) if is_swapped else condition.args
        if not self._is_expressible(left) or not self._is_expressible(right):
            return None
        return Guard(left=self._dim(left), relation=relation, right=self._dim(right))

    def is_implied(self, guard: Guard) -> bool:
        """Return whether a condition on one symbol holds for all sizes in its range, as far as the range is small enough to try."""
        names = {*symbol_names(guard.left), *symbol_names(guard.right)}
        ranges = [symbol for symbol in self.symbols if symbol.name in names]
        if len(ranges) != 1 or ranges[0].min is None or ranges[0].max is None:
            return False
        sizes = range(ranges[0].min, ranges[0].max + 1)
        return len(sizes) <= _MAX_TRIED_SIZES and all(guard_holds(guard, {ranges[0].name: size}) for size in sizes)

    def _is_expressible(self, expression: sympy.Expr) -> bool:
        if expression.is_Integer or expression.is_Symbol:
            return True
        return type(expression) in _OPERATIONS and all(map(self._is_expressible, expression.args))

    def _dim(self, expression: sympy.Expr) -> Dim:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol or not self._is_expressible(expression):
            return self._symbol_name(expression)
        args = [self._dim(arg) for arg in expression.args]
        if isinstance(expression, sympy.Add | sympy.Mul):
            args.sort(key=lambda arg: (isinstance(arg, int), str(arg)))
        return Expr(op=_OPERATIONS[type(expression)], args=tuple(args))

    def _symbol_name(self, expression: sympy.Expr) -> str:
        if expression not in self._symbols:
            value_range = self._ranges.get(expression)
            lower = _finite_bound(getattr(value_range, "lower", None))
            upper = _finite_bound(getattr(value_range, "upper", None))
            example = self._example_value(expression, lower, upper)
            symbol_name = self._unique_name(expression)
            self._symbols[expression] = Symbol(name=symbol_name, min=lower, max=upper, example=example)
        return self._symbols[expression].name

    def _unique_name(self, expression: sympy.Expr) -> str:
        taken_names = {symbol.name for symbol in self._symbols.values()}
        dim_name = self._dim_names.get(str(expression), "")
        if is_identifier(dim_name) and dim_name not in taken_names:
            return dim_name
        candidates = (f"s{index}" for index in range(len(taken_names) + 1))
        return next(candidate for candidate in candidates if candidate not in taken_names)

    def _example_value(self, expression: sympy.Expr, lower: int | None, upper: int | None) -> int | None:
        """The value in the example; None if it depends on data or is outside the range."""
        value = expression.xreplace(dict(self._example_values))
        if not value.is_Integer or not (lower or 0) <= int(value) <= (int(value) if upper is None else upper):
            return None
        return int(value)


def _finite_bound(bound: object) -> int | None:
    if isinstance(bound, int | sympy.Integer) and abs(int(bound)) < _MAX_BOUND:
        return int(bound)
    return None
