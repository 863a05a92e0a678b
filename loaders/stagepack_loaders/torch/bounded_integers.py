"""Python operators on numbers of the graph, with bounded results.

A size, and whatever is computed from sizes, fits 64 bits. Python computes integers of any length, and holds the interpreter meanwhile:
``9 ** 10**9`` takes hours, and so does a chain of products. Sequences, which these operators would repeat, join or fill in, are refused.
Symbolic integers, which a compiler traces, pass unchecked.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

_LARGEST: Final = 2**63


def bounded_add(a: Any, b: Any, /) -> Any:
    """Return ``a + b``."""
    _refuse_sequences(a, b)
    total = operator.add(a, b)
    if _are_integers(a, b) and abs(total) > _LARGEST:
        raise _overflow("sum")
    return total


def bounded_sub(a: Any, b: Any, /) -> Any:
    """Return ``a - b``."""
    difference = operator.sub(a, b)
    if _are_integers(a, b) and abs(difference) > _LARGEST:
        raise _overflow("difference")
    return difference


def bounded_mod(a: Any, b: Any, /) -> Any:
    """Return ``a % b``."""
    _refuse_sequences(a, b)
    return operator.mod(a, b)


def bounded_mul(a: Any, b: Any, /) -> Any:
    """Return ``a * b``."""
    _refuse_sequences(a, b)
    product = operator.mul(a, b)
    if _are_integers(a, b) and abs(product) > _LARGEST:
        raise _overflow("product")
    return product


def bounded_pow(a: Any, b: Any, /) -> Any:
    """Return ``a ** b``."""
    if _are_integers(a, b) and abs(a) > 1 and (b > _LARGEST.bit_length() or (b > 0 and abs(a**b) > _LARGEST)):
        raise _overflow("power")
    return operator.pow(a, b)


def bounded_lshift(a: Any, b: Any, /) -> Any:
    """Return ``a << b``."""
    if _are_integers(a, b) and a and (b > _LARGEST.bit_length() or (b > 0 and abs(a << b) > _LARGEST)):
        raise _overflow("shifted integer")
    return operator.lshift(a, b)


# By the name of the operator in a graph.
BOUNDED_OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "operator.add": bounded_add,
    "operator.lshift": bounded_lshift,
    "operator.mod": bounded_mod,
    "operator.mul": bounded_mul,
    "operator.pow": bounded_pow,
    "operator.sub": bounded_sub,
}


def _are_integers(a: Any, b: Any) -> bool:
    """Whether both are integers of Python. False while a compiler traces: the answer would become a condition on the sizes of calls."""
    return not torch.compiler.is_compiling() and isinstance(a, int) and isinstance(b, int)


def _refuse_sequences(a: Any, b: Any) -> None:
    if isinstance(a, str | list | tuple) or isinstance(b, str | list | tuple):
        raise TypeError(f"expected numbers, found {type(a).__name__} and {type(b).__name__}")


def _overflow(result_name: str) -> OverflowError:
    return OverflowError(f"expected integers of at most 64 bits, found a {result_name} whose magnitude is above 2^63")
