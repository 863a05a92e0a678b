"""Conditions on sizes that hold for all sizes in the ranges of their symbols."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Final, NamedTuple

from stagepack.format.shapes import Dim, Expr, Guard, Symbol, guard_holds, symbol_names

# The symbols, quotients and extrema that are multiplied, sorted; empty for a number.
_Product = tuple[Dim, ...]
# The factor of each product.
_Sum = Mapping[_Product, int]

# Sizes of one symbol for which a condition is tried.
_MOST_TRIED_SIZES: Final = 10_000
_MOST_TERMS: Final = 64
_MOST_EXPONENT: Final = 4
# How many quotients and extrema are replaced by what bounds them, one after the other.
_REPLACEMENTS: Final = 3
# How many sums are bounded for one condition, each in about 10 microseconds.
_MOST_BOUNDS: Final = 5_000
_INFINITY: Final = math.inf


class _UndecidedError(Exception):
    """The arithmetic is too large, or has no value for some sizes."""


class _Interval(NamedTuple):
    """The integers from one to another, which are both included."""

    low: float
    high: float


def is_implied(guard: Guard, symbols: Iterable[Symbol]) -> bool:
    """Return whether a condition holds for all sizes in the ranges of symbols, by their bounds or by a trial of all sizes of one symbol.

    False where that is not found. A symbol that is not among these has any size.
    """
    guard_symbols = {*symbol_names(guard.left), *symbol_names(guard.right)}
    ranges = [symbol for symbol in symbols if symbol.name in guard_symbols]
    try:
        if _Sizes(ranges).satisfy(guard):
            return True
    except (_UndecidedError, OverflowError):
        pass
    if len(guard_symbols) != 1 or not ranges or ranges[0].min is None or ranges[0].max is None:
        return False
    sizes = range(ranges[0].min, ranges[0].max + 1)
    return len(sizes) <= _MOST_TRIED_SIZES and all(guard_holds(guard, {ranges[0].name: size}) for size in sizes)


class _Sizes:
    """Interval arithmetic on sums of products over the sizes that symbols allow. All bounds are right, but there may be closer ones."""

    def __init__(self, symbols: Iterable[Symbol]) -> None:
        self._ranges = {
            symbol.name: _Interval(
                -_INFINITY if symbol.min is None else symbol.min, _INFINITY if symbol.max is None else symbol.max
            )
            for symbol in symbols
        }
        self._sums: dict[Dim, _Sum] = {}
        self._remaining_bounds = _MOST_BOUNDS

    def satisfy(self, guard: Guard) -> bool:
        gap = _added(self._sum(guard.right), self._sum(guard.left), -1)
        match guard.relation:
            case "le":
                return self._lower(gap) >= 0
            case "lt":
                return self._lower(gap) >= 1
            case "eq":
                return self._lower(gap) == self._upper(gap) == 0
            case _:
                factors = [factor for product, factor in gap.items() if product]
                is_no_multiple = bool(gap.get((), 0) % math.gcd(*factors)) if factors else False
                return is_no_multiple or self._lower(gap) >= 1 or self._upper(gap) <= -1

    def _sum(self, dim: Dim) -> _Sum:
        """A dimension as a sum of products, the same for equal sums however they are written."""
        if dim not in self._sums:
            self._sums[dim] = self._new_sum(dim)
        return self._sums[dim]

    def _new_sum(self, dim: Dim) -> _Sum:
        if isinstance(dim, int):
            return {(): dim} if dim else {}
        if isinstance(dim, str):
            return {(dim,): 1}
        args = [self._sum(arg) for arg in dim.args]
        match dim.op:
            case "add":
                return reduce(_added, args)
            case "mul":
                return reduce(_multiplied, args)
            case "floordiv":
                return self._quotient(*args)
            case "mod":
                dividend, divisor = args
                return _added(dividend, _multiplied(divisor, self._quotient(dividend, divisor)), -1)
            case "max" | "min":
                return self._extremum(dim.op, args)
        base, exponent = args
        power = exponent.get((), 0)
        if exponent.keys() - {()} or not 0 <= power <= _MOST_EXPONENT:
            raise _UndecidedError
        return reduce(_multiplied, [base] * power, {(): 1})

    def _quotient(self, dividend: _Sum, divisor: _Sum) -> _Sum:
        if self._lower(divisor) < 1:
            raise _UndecidedError
        quotient: dict[_Product, int] = {}
        remainder = dict(dividend)
        if len(divisor) == 1:
            ((unit, scale),) = divisor.items()
            for product, factor in dividend.items():
                cofactors = _without(product, unit)
                if cofactors is not None:
                    quotient[cofactors], remainder[product] = divmod(factor, scale)
        remainder = _without_zeros(remainder)
        if self._lower(remainder) >= 0 and self._lower(_added(divisor, remainder, -1)) >= 1:
            return _without_zeros(quotient)
        of_remainder = self._atom(Expr(op="floordiv", args=(_dim(remainder), _dim(divisor))))
        return _added(_without_zeros(quotient), of_remainder)

    def _extremum(self, op: str, args: Iterable[_Sum]) -> _Sum:
        """The largest or the smallest of sums, without those that another one is in the place of for all sizes."""
        sign = 1 if op == "max" else -1
        extreme_sums: list[_Sum] = []
        for candidate in args:
            if not any(self._lower(_added(term, candidate, -1, sign)) >= 0 for term in extreme_sums):
                extreme_sums = [term for term in extreme_sums if self._lower(_added(candidate, term, -1, sign)) < 0]
                extreme_sums.append(candidate)
        if len(extreme_sums) == 1:
            return extreme_sums[0]
        return self._atom(Expr(op=op, args=tuple(sorted(map(_dim, extreme_sums), key=str))))

    def _atom(self, expr: Expr) -> _Sum:
        """A part of which no sum is known; a number if its bounds are equal."""
        low, high = self._atom_interval(expr)
        return self._sum(int(low)) if low == high else self._sums.setdefault(expr, {(expr,): 1})

    def _upper(self, terms: _Sum) -> float:
        return -self._lower(_added({}, terms, -1))

    def _lower(self, terms: _Sum, replacements: int = _REPLACEMENTS) -> float:
        """The largest lower bound that is found of a sum."""
        self._remaining_bounds -= 1
        if self._remaining_bounds < 0:
            raise _UndecidedError
        bounds = [sum(_scaled(self._interval(product), factor).low for product, factor in terms.items())]
        if replacements:
            for product, factor in terms.items():
                if len(product) == 1 and isinstance(product[0], Expr):
                    further_terms = {key: value for key, value in terms.items() if key != product}
                    bounds.append(self._lower_without(product[0], factor, further_terms, replacements - 1))
        return max(bounds)

    def _lower_without(self, atom: Expr, factor: int, further_terms: _Sum, replacements: int) -> float:
        """A lower bound of ``further_terms + factor * atom``, by what bounds the atom."""
        args = [self._sum(arg) for arg in atom.args]
        if atom.op == "floordiv":
            dividend, divisor = args
            scale = divisor.get((), 0)
            if divisor.keys() != {()}:
                return -_INFINITY
            # The divisor times the quotient is from the dividend - divisor + 1 to the dividend.
            closest = dividend if factor < 0 else _added(dividend, {(): scale - 1}, -1)
            lower = self._lower(_added(_added({}, further_terms, scale), closest, factor), replacements)
            return lower if math.isinf(lower) else -(-lower // scale)
        bounds = [self._lower(_added(further_terms, arg, factor), replacements) for arg in args]
        return max(bounds) if (atom.op == "max") == (factor > 0) else min(bounds)

    def _interval(self, product: _Product) -> _Interval:
        return reduce(_interval_product, map(self._atom_interval, product), _Interval(1, 1))

    def _atom_interval(self, atom: Dim) -> _Interval:
        if not isinstance(atom, Expr):
            return self._ranges.get(str(atom), _Interval(-_INFINITY, _INFINITY))
        intervals = [_Interval(self._lower(arg, 0), self._upper_at_once(arg)) for arg in map(self._sum, atom.args)]
        if atom.op == "floordiv":
            dividend, divisor = intervals
            return _Interval(
                min(_floor(dividend.low, end) for end in divisor), max(_floor(dividend.high, end) for end in divisor)
            )
        extremum: Callable[..., float] = max if atom.op == "max" else min
        return _Interval(*(extremum(ends) for ends in zip(*intervals, strict=True)))

    def _upper_at_once(self, terms: _Sum) -> float:
        return -self._lower(_added({}, terms, -1), 0)


def _added(left: _Sum, right: _Sum, right_factor: int = 1, factor: int = 1) -> _Sum:
    """``factor * (left + right_factor * right)``."""
    total = {product: factor * of_left for product, of_left in left.items()}
    for product, of_right in right.items():
        total[product] = total.get(product, 0) + factor * right_factor * of_right
    return _without_zeros(total)


def _multiplied(left: _Sum, right: _Sum) -> _Sum:
    total: dict[_Product, int] = {}
    for left_product, left_factor in left.items():
        for right_product, right_factor in right.items():
            product = tuple(sorted((*left_product, *right_product), key=str))
            total[product] = total.get(product, 0) + left_factor * right_factor
    return _without_zeros(total)


def _without_zeros(terms: _Sum) -> dict[_Product, int]:
    if len(terms) > _MOST_TERMS:
        raise _UndecidedError
    return {product: factor for product, factor in terms.items() if factor}


def _without(product: _Product, divisor: _Product) -> _Product | None:
    """A product divided by another; None if it is no multiple of that."""
    cofactors = list(product)
    for part in divisor:
        if part not in cofactors:
            return None
        cofactors.remove(part)
    return tuple(cofactors)


def _dim(terms: _Sum) -> Dim:
    """The dimension that a sum of products is."""
    products: list[Dim] = [
        Expr(op="mul", args=(factor, *product)) if product else factor for product, factor in terms.items()
    ]
    return Expr(op="add", args=tuple(sorted(products, key=str))) if products else 0


def _scaled(interval: _Interval, factor: int) -> _Interval:
    return _interval_product(interval, _Interval(factor, factor))


def _interval_product(left: _Interval, right: _Interval) -> _Interval:
    # An end of 0 times an end without a limit is 0: there is no size that is infinite.
    ends = [low * high if low and high else 0 for low in left for high in right]
    return _Interval(min(ends), max(ends))


def _floor(dividend: float, divisor: float) -> float:
    if math.isinf(dividend):
        return dividend
    if math.isinf(divisor):
        return 0 if dividend >= 0 else -1
    return dividend // divisor
