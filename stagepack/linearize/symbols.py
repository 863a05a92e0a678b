"""torch's symbolic sizes (sympy) -> symbols and dimensions of the format."""

from collections.abc import Mapping

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from stagepack.format.shapes import Dim, Expr, Symbol
from stagepack.format.validate import is_identifier

_OPERATIONS = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    FloorDiv: "floordiv",
    CleanDiv: "floordiv",
    Mod: "mod",
    PythonMod: "mod",
    Max: "max",
    Min: "min",
    sympy.Max: "max",
    sympy.Min: "min",
}


class SymbolTable:
    """The symbols of one program. A symbol is named by the caller's ``Dim``, else ``s0``, ``s1`` ... by first use."""

    def __init__(
        self,
        ranges: Mapping[sympy.Symbol, object],
        names: Mapping[str, str],
        hints: Mapping[sympy.Symbol, sympy.Integer],
    ) -> None:
        """`ranges` are torch's value ranges; `names` maps torch's symbols to the caller's names, `hints` to the example's sizes."""
        self._ranges = ranges
        self._hints = hints
        self._names = names
        self._found: dict[sympy.Expr, Symbol] = {}

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols met so far, in the order of their first use."""
        return tuple(self._found.values())

    def dim(self, size: "int | torch.SymInt") -> Dim:
        """A size as a dimension; arithmetic that the format cannot write becomes a symbol of its own, without bounds."""
        if isinstance(size, int):
            return size
        return self._convert(size.node.expr)

    def known(self, number: "torch.SymInt") -> Dim | None:
        """What a symbolic integer equals, or None where the format cannot say."""
        expression = number.node.expr
        return self._convert(expression) if self._writable(expression) else None

    def _writable(self, expression: sympy.Expr) -> bool:
        if expression.is_Integer or expression.is_Symbol:
            return True
        return type(expression) in _OPERATIONS and all(map(self._writable, expression.args))

    def _convert(self, expression: sympy.Expr) -> Dim:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol or not self._writable(expression):
            return self._symbol(expression)
        args = [self._convert(arg) for arg in expression.args]
        if isinstance(expression, sympy.Add | sympy.Mul):
            args.sort(key=lambda arg: (isinstance(arg, int), str(arg)))
        return Expr(op=_OPERATIONS[type(expression)], args=tuple(args))

    def _symbol(self, expression: sympy.Expr) -> str:
        if expression not in self._found:
            taken = {symbol.name for symbol in self._found.values()}
            name = self._names.get(str(expression), "")
            if not is_identifier(name) or name in taken:
                name = next(f"s{number}" for number in range(len(taken) + 1) if f"s{number}" not in taken)
            bounds = self._ranges.get(expression)
            lower, upper = _bound(getattr(bounds, "lower", None)), _bound(getattr(bounds, "upper", None))
            self._found[expression] = Symbol(
                name=name, min=lower, max=upper, example=self._example(expression, lower, upper)
            )
        return self._found[expression].name

    def _example(self, expression: sympy.Expr, lower: int | None, upper: int | None) -> int | None:
        """The size in the example, unless only the data tells it."""
        size = expression.xreplace(dict(self._hints))
        if not size.is_Integer or not (lower or 0) <= int(size) <= (int(size) if upper is None else upper):
            return None
        return int(size)


def _bound(bound: object) -> int | None:
    """A bound of torch's range as a number; its infinities, and what stands for them, as None."""
    if isinstance(bound, int | sympy.Integer) and abs(int(bound)) < 2**62:
        return int(bound)
    return None
