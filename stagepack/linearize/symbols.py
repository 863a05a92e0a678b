"""Symbolic sizes of torch (sympy) -> symbols and dimensions of the format."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import sympy
import torch
from torch.export import ExportedProgram

from stagepack.format import limits
from stagepack.format.rules import is_identifier
from stagepack.format.shapes import Dim, Expr, Symbol
from stagepack.torch_internals import example_symbol_values, symbolic_expression, symbolic_functions, symbolic_sizes

_Value = TypeVar("_Value")
_OPERATIONS: Mapping[type, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    sympy.Max: "max",
    sympy.Min: "min",
    **symbolic_functions(),
}
_MAX_BOUND = 2**62  # torch's infinities are larger


class TracedSymbol(NamedTuple):
    """The name that torch has for a symbol, and the smallest size that it traced the program for."""

    name: str
    min: int | None


class SymbolTable:
    """The symbols of one program. A symbol has the name of the caller's ``Dim``, else ``s0``, ``s1`` ... by first use."""

    def __init__(
        self, program: ExportedProgram, dim_names: Mapping[str, str], smallest_sizes: Mapping[str, int]
    ) -> None:
        self._smallest_sizes = smallest_sizes
        # What torch has for each symbol that was used so far, by its name here.
        self.traced_symbols: dict[str, TracedSymbol] = {}
        self._ranges = program.range_constraints
        self._dim_names = dim_names
        self._example_values = example_symbol_values(program)
        input_sizes = symbolic_sizes(program.graph.find_nodes(op="placeholder"))
        self._input_sizes = {symbolic_expression(size) for size in input_sizes}
        self._symbols: dict[sympy.Expr, Symbol] = {}

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols that were used so far, in the order of their first use."""
        return tuple(self._symbols.values())

    def symbol(self, variable: sympy.Symbol) -> Symbol | None:
        """Return the symbol for one of torch's, if it was used so far."""
        return self._symbols.get(variable)

    def dim(self, size: "int | torch.SymInt") -> Dim:
        """Return a size as a dimension."""
        return size if isinstance(size, int) else self._dim(symbolic_expression(size))

    def exact_dim(self, size: "torch.SymInt") -> Dim | None:
        """Return a symbolic integer as a dimension; None if the format cannot express its arithmetic."""
        return self.expressed(symbolic_expression(size))

    def expressed(self, expression: sympy.Expr) -> Dim | None:
        """Return an expression of torch as a dimension; None if the format cannot express its arithmetic."""
        return self._dim(expression) if self._is_expressible(expression) else None

    def _is_expressible(self, expression: sympy.Expr) -> bool:
        if expression.is_Integer or expression.is_Symbol:
            return bool(expression.is_Symbol) or abs(int(expression)) <= limits.TENSOR_ELEMENTS
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
            traced_min, upper = self._bounds(expression)
            lower = (
                None if traced_min is None else min(traced_min, self._smallest_sizes.get(str(expression), traced_min))
            )
            example = self._example_value(expression, lower, upper)
            symbol_name = self._unique_name(expression)
            self.traced_symbols[symbol_name] = TracedSymbol(str(expression), traced_min)
            self._symbols[expression] = Symbol(name=symbol_name, min=lower, max=upper, example=example)
        return self._symbols[expression].name

    def _bounds(self, expression: sympy.Expr) -> tuple[int | None, int | None]:
        """The range of a symbol. Of one that only expressions over it are sizes of inputs, such as ``4*h``, their ranges decide.

        torch 2.13 starts the range of such a symbol at 2, also where ``Dim("h", min=1)`` says otherwise, and checks those of the sizes.
        """
        derived = list(_solutions(expression, {size: self._ranges.get(size) for size in self._input_sizes}))
        if expression in self._input_sizes or not derived:
            value_range = self._ranges.get(expression)
            return _finite_bound(getattr(value_range, "lower", None)), _finite_bound(
                getattr(value_range, "upper", None)
            )
        lowers, uppers = [], []
        for factor, offset, size_range in derived:
            first, last = (_finite_bound(getattr(size_range, end, None)) for end in ("lower", "upper"))
            if factor < 0:
                first, last = last, first
            lowers += [] if first is None else [-((offset - first) // factor)]
            uppers += [] if last is None else [(last - offset) // factor]
        return max(lowers, default=None), min(uppers, default=None)

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
        # A program that was read from a file has the values of the sizes 4*h, but not the value of h.
        for factor, offset, size in _solutions(expression, self._example_values):
            value = sympy.Integer((int(size) - offset) // factor)
        if not value.is_Integer or not (lower or 0) <= int(value) <= (int(value) if upper is None else upper):
            return None
        return int(value)


def _solutions(symbol: sympy.Expr, values: Mapping[sympy.Expr, _Value]) -> Iterator[tuple[int, int, _Value]]:
    """The expressions ``factor*symbol + offset`` among some, as factor, offset and what the expression maps to."""
    for expression, value in values.items():
        if expression != symbol and expression.free_symbols == {symbol}:
            factor = expression.coeff(symbol)
            offset = expression - factor * symbol
            if factor.is_Integer and offset.is_Integer and factor:
                yield int(factor), int(offset), value


def _finite_bound(bound: object) -> int | None:
    if isinstance(bound, int | sympy.Integer) and abs(int(bound)) < _MAX_BOUND:
        return int(bound)
    return None
