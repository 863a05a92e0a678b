"""The boundary contract at run time: match a call with the signature, and values with their shapes and ranges.

It works on anything with `shape` and `dtype`: torch tensors and numpy arrays alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.shapes import (
    Dim,
    Expr,
    Symbol,
    evaluate_dim,
    format_dim,
    format_range,
    format_shape,
    size_in_range,
    symbol_names,
)
from stagepack.format.signature import Signature
from stagepack.format.tree import (
    UNUSED_VALUE,
    ConstantLeaf,
    NonFiniteLeaf,
    ValueLeaf,
    constant_value,
    flatten_tree,
    value_names,
)

_PYTHON: Mapping[str, type] = {"symint": int, "symfloat": float, "symbool": bool}


@dataclass(frozen=True, slots=True)
class BoundArgument:
    """A value that the caller gave; `where` names the place in the call, such as ``batch['input_ids']``."""

    location: str
    value: Any


def bind_call(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, BoundArgument]:
    """Match a call with the signature: the name of each value -> what the caller gave for it.

    Raises:
        InputError: an argument is missing, unknown or given twice, containers differ, or a constant differs from the export's, or two
            values that were one.
    """
    named = _by_parameter(signature, args, kwargs)
    bound: dict[str, BoundArgument] = {}
    for parameter in signature.parameters:
        if parameter.name not in named:
            if any(True for _ in value_names(parameter.tree)):
                raise InputError(f"the argument {parameter.name!r} is missing")
            continue
        for where, leaf, given in flatten_tree(parameter.tree, named[parameter.name], parameter.name):
            if isinstance(leaf, ValueLeaf):
                first = bound.setdefault(leaf.name, BoundArgument(where, given))
                same = first.value is given or (isinstance(given, bool | int | float) and first.value == given)
                if not same and leaf.name != UNUSED_VALUE:
                    raise InputError(f"{where} was the same as {first.location} at export: export again to change it")
            else:
                check_constant(leaf, given, where)
    return bound


def check_values(
    expected: Iterable[Value | Edge], bound: Mapping[str, BoundArgument], symbols: Iterable[Symbol]
) -> dict[str, int]:
    """Check values against their types, shapes and ranges; return the sizes of the symbols.

    Raises:
        InputError: the first value that does not fit: which one, which dimension, and what is allowed.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    derived: list[tuple[str, Expr, int]] = []
    for value in expected:
        given = bound[value.name]
        for place, dim, size in _sizes(value, given):
            if isinstance(dim, int) and size != dim:
                raise InputError(f"{place} is {size}, allowed is {dim} (shape {format_shape(value.shape)})")
            if isinstance(dim, str):
                if sizes.setdefault(dim, size) != size:
                    raise InputError(
                        f"{place} is {size}, but {dim!r} is {sizes[dim]} in {origin[dim]}: they must be equal"
                    )
                origin.setdefault(dim, place)
            elif isinstance(dim, Expr):
                derived.append((place, dim, size))
    left = len(derived) + 1
    while len(derived) < left:  # one that tells the size of a symbol lets others be checked, before it and after
        left = len(derived)
        derived = [entry for entry in derived if not _check_derived(*entry, sizes, origin)]
    for symbol in symbols:
        if symbol.name in sizes and not size_in_range(symbol, sizes[symbol.name]):
            found = f"{origin[symbol.name]} is {sizes[symbol.name]}"
            raise InputError(f"{found}, allowed is {format_range(symbol)} ({symbol.name!r})")
    return sizes


def _by_parameter(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    positional = [parameter for parameter in signature.parameters if parameter.positional]
    if len(args) > len(positional):
        raise InputError(f"expected at most {len(positional)} positional arguments, found {len(args)}")
    named = {parameter.name: given for parameter, given in zip(positional, args, strict=False)}
    by_name = {parameter.name for parameter in signature.parameters if parameter.keyword}
    for name, given in kwargs.items():
        if name in named:
            raise InputError(f"the argument {name!r} is given by position and by name")
        if name not in by_name:
            raise InputError(f"there is no argument {name!r}: the model was exported with {', '.join(sorted(by_name))}")
        named[name] = given
    return named


def check_constant(leaf: ConstantLeaf | NonFiniteLeaf, given: Any, where: str) -> None:
    """Check what stands in the place of a constant.

    Raises:
        InputError: it is another one.
    """
    expected = constant_value(leaf)
    same = type(given) is type(expected) and (given == expected or (given != given and expected != expected))
    if not same:
        found = repr(given) if isinstance(given, None | bool | int | float | str) else type(given).__name__
        raise InputError(f"{where} was fixed to {expected!r} at export, found {found}: export again to change it")


def _sizes(value: Value | Edge, given: BoundArgument) -> Iterable[tuple[str, Dim, int]]:
    """The sizes that a value brings: (place, expected dimension, found size)."""
    if value.dtype in SCALAR_DTYPES:
        wanted = _PYTHON[value.dtype]
        if type(given.value) is not wanted:
            raise InputError(
                f"{given.location}: expected a Python {wanted.__name__}, found {type(given.value).__name__}"
            )
        number: Any = given.value
        return [(given.location, value.expr, number)] if value.expr is not None else []
    shape, dtype = getattr(given.value, "shape", None), getattr(given.value, "dtype", None)
    if shape is None or dtype is None:
        raise InputError(
            f"{given.location}: expected a tensor of {value.dtype} {format_shape(value.shape)}, found {type(given.value).__name__}"
        )
    if str(dtype).removeprefix("torch.") != value.dtype:
        raise InputError(f"{given.location}: expected dtype {value.dtype}, found {str(dtype).removeprefix('torch.')}")
    if len(shape) != len(value.shape):
        raise InputError(
            f"{given.location}: expected {len(value.shape)} dimensions {format_shape(value.shape)}, found the shape {list(shape)}"
        )
    return [
        (f"{given.location}: dimension {number}", dim, size)
        for number, (dim, size) in enumerate(zip(value.shape, shape, strict=True))
    ]


def _check_derived(place: str, dim: Expr, size: int, sizes: dict[str, int], origin: dict[str, str]) -> bool:
    """Check a size that is arithmetic over symbols; it also tells the size of the one symbol that is still unknown.

    Returns whether it could be checked: it may hold sizes that only the data tells, which the graph's own assertions check.
    """
    unknown = {name for name in symbol_names(dim) if name not in sizes}
    try:
        if len(unknown) == 1 and (solved := _solve(dim, size, sizes)) is not None:
            sizes[solved[0]] = solved[1]
            origin[solved[0]] = place
        expected = evaluate_dim(dim, sizes)
    except (KeyError, ArithmeticError):
        return False
    if expected != size:
        raise InputError(f"{place} is {size}, allowed is {format_dim(dim)} = {expected}")
    return True


def _solve(dim: Dim, size: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The unknown symbol of a sum or a product, and its size; None when it is not that simple."""
    if isinstance(dim, str):
        return dim, size
    if not isinstance(dim, Expr) or dim.op not in ("add", "mul"):
        return None
    known = [arg for arg in dim.args if all(name in sizes for name in symbol_names(arg))]
    rest = [arg for arg in dim.args if arg not in known]
    if len(rest) != 1:
        return None
    number = evaluate_dim(Expr(op=dim.op, args=tuple(known)), sizes)
    if dim.op == "add":
        return _solve(rest[0], size - number, sizes)
    return _solve(rest[0], size // number, sizes) if number else None
