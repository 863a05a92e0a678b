"""The boundary contract at run time: match a call with the signature, and check values against their dtypes, shapes and ranges.

It works on every object with `shape` and `dtype`, such as torch tensors and numpy arrays.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.shapes import (
    Dim,
    Expr,
    Guard,
    Symbol,
    evaluate_dim,
    format_dim,
    format_guard,
    format_range,
    format_shape,
    guard_holds,
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

# The Python class of a symbolic scalar.
_SCALAR_TYPES: Mapping[str, type] = {"symint": int, "symfloat": float, "symbool": bool}


@dataclass(frozen=True, slots=True)
class BoundArgument:
    """The object that a caller passed for a value.

    Attributes:
        location: the location of the object in the call, such as ``batch['input_ids']``, for messages.
        value: the object.
    """

    location: str
    value: Any


def bind_call(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, BoundArgument]:
    """Match a call with the signature.

    Args:
        signature: the recorded signature.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Returns:
        The object for each value of the signature, by value name.

    Raises:
        InputError: an argument is missing, unknown or given twice; or its containers differ from those at export; or a constant has
            another value than at export; or two objects that were the same at export differ.
    """
    arguments = _arguments_by_parameter(signature, args, kwargs)
    bound: dict[str, BoundArgument] = {}
    for parameter in signature.parameters:
        if parameter.name not in arguments:
            if any(True for _ in value_names(parameter.tree)):
                raise InputError(f"the argument {parameter.name!r} is missing")
            continue
        for location, leaf, value in flatten_tree(parameter.tree, arguments[parameter.name], parameter.name):
            if isinstance(leaf, ValueLeaf):
                first = bound.setdefault(leaf.name, BoundArgument(location, value))
                same = first.value is value or (isinstance(value, bool | int | float) and first.value == value)
                if not same and leaf.name != UNUSED_VALUE:
                    raise InputError(
                        f"{location} was the same as {first.location} at export: export again to change it"
                    )
            else:
                check_constant(leaf, value, location)
    return bound


def check_values(
    expected: Iterable[Value | Edge],
    bound: Mapping[str, BoundArgument],
    symbols: Iterable[Symbol],
    guards: Iterable[Guard] = (),
) -> dict[str, int]:
    """Check values against their dtypes, shapes and ranges, and their sizes against conditions.

    Args:
        expected: the values of a graph, or edges.
        bound: the object for each expected value, by value name.
        symbols: the symbols whose ranges are checked.
        guards: the conditions on the sizes of symbols.

    Returns:
        The size of each symbol that the values determine.

    Raises:
        InputError: a value does not fit. The message has its location, the expected size and the size found.
    """
    sizes: dict[str, int] = {}
    origins: dict[str, str] = {}
    unchecked: list[tuple[str, Expr, int]] = []
    for value in expected:
        argument = bound[value.name]
        for location, dim, size in _checked_sizes(value, argument):
            if isinstance(dim, int) and size != dim:
                raise InputError(f"{location}: expected {dim} (shape {format_shape(value.shape)}), found {size}")
            if isinstance(dim, str):
                if sizes.setdefault(dim, size) != size:
                    raise InputError(
                        f"{location}: expected {sizes[dim]}, the size of {dim!r} in {origins[dim]}, found {size}"
                    )
                origins.setdefault(dim, location)
            elif isinstance(dim, Expr):
                unchecked.append((location, dim, size))
    _check_expressions(unchecked, sizes, origins)
    for symbol in symbols:
        if symbol.name in sizes and not size_in_range(symbol, sizes[symbol.name]):
            allowed = f"{format_range(symbol)} ({symbol.name!r})"
            raise InputError(f"{origins[symbol.name]}: expected {allowed}, found {sizes[symbol.name]}")
    for guard in guards:
        if not guard_holds(guard, sizes):
            names = dict.fromkeys(name for side in (guard.left, guard.right) for name in symbol_names(side))
            found = ", ".join(f"{name} = {sizes[name]} ({origins[name]})" for name in names)
            raise InputError(f"expected {format_guard(guard)}, for which the model was captured, found {found}")
    return sizes


def check_constant(leaf: ConstantLeaf | NonFiniteLeaf, argument: Any, location: str) -> None:
    """Check an argument that was fixed at export.

    Args:
        leaf: the recorded constant.
        argument: the object that the caller passed for it.
        location: the location of the object in the call, for messages.

    Raises:
        InputError: the object has another type or value than the constant.
    """
    constant = constant_value(leaf)
    same = type(argument) is type(constant) and (
        argument == constant or (argument != argument and constant != constant)
    )
    if not same:
        shown = repr(argument) if isinstance(argument, None | bool | int | float | str) else type(argument).__name__
        raise InputError(f"{location} was fixed to {constant!r} at export, found {shown}: export again to change it")


def _arguments_by_parameter(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    positional = [parameter for parameter in signature.parameters if parameter.positional]
    if len(args) > len(positional):
        raise InputError(f"expected at most {len(positional)} positional arguments, found {len(args)}")
    arguments = {parameter.name: argument for parameter, argument in zip(positional, args, strict=False)}
    keywords = {parameter.name for parameter in signature.parameters if parameter.keyword}
    for keyword, argument in kwargs.items():
        if keyword in arguments:
            raise InputError(f"the argument {keyword!r} is given by position and by name")
        if keyword not in keywords:
            exported_with = ", ".join(sorted(keywords))
            raise InputError(f"there is no argument {keyword!r}: the model was exported with {exported_with}")
        arguments[keyword] = argument
    return arguments


def _checked_sizes(value: Value | Edge, argument: BoundArgument) -> Iterable[tuple[str, Dim, int]]:
    """Check type, dtype and rank of an argument; return its sizes as (location, expected dimension, actual size)."""
    location, passed_value = argument.location, argument.value
    if value.dtype in SCALAR_DTYPES:
        scalar_type = _SCALAR_TYPES[value.dtype]
        if type(passed_value) is not scalar_type:
            raise InputError(
                f"{location}: expected a Python {scalar_type.__name__}, found {type(passed_value).__name__}"
            )
        # Only a symint has an expr, so this object is an int.
        return [(location, value.expr, argument.value)] if value.expr is not None else []
    expected_shape = format_shape(value.shape)
    shape, dtype = getattr(passed_value, "shape", None), getattr(passed_value, "dtype", None)
    if shape is None or dtype is None:
        raise InputError(
            f"{location}: expected a tensor of {value.dtype} {expected_shape}, found {type(passed_value).__name__}"
        )
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name != value.dtype:
        raise InputError(f"{location}: expected dtype {value.dtype}, found {dtype_name}")
    if len(shape) != len(value.shape):
        raise InputError(
            f"{location}: expected {len(value.shape)} dimensions {expected_shape}, found the shape {list(shape)}"
        )
    return [
        (f"{location}: dimension {index}", dim, size)
        for index, (dim, size) in enumerate(zip(value.shape, shape, strict=True))
    ]


def _check_expressions(
    expressions: Sequence[tuple[str, Expr, int]], sizes: dict[str, int], origins: dict[str, str]
) -> None:
    """Check the sizes of dimensions that are arithmetic, and solve each for the last symbol whose size is still unknown.

    A symbol that is solved may let earlier and later expressions be checked. An expression over sizes that depend on the data cannot be;
    assertions in the graph check these.

    Args:
        expressions: the location, the expression and the size of each dimension.
        sizes: the sizes of symbols so far, to which those are added that the expressions determine.
        origins: the location that determines the size of each symbol, likewise.

    Raises:
        InputError: a size differs from its expression.
    """
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    unknown_counts = []
    for index, (_, dim, _) in enumerate(expressions):
        unknown = {symbol_name for symbol_name in symbol_names(dim) if symbol_name not in sizes}
        unknown_counts.append(len(unknown))
        for symbol_name in unknown:
            waiting[symbol_name].append(index)
    ready = deque(index for index, unknown_count in enumerate(unknown_counts) if unknown_count <= 1)
    while ready:
        location, dim, size = expressions[ready.popleft()]
        try:
            if (solution := _solve(dim, size, sizes)) is not None:
                symbol_name, sizes[symbol_name] = solution
                origins[symbol_name] = location
                for index in waiting.pop(symbol_name):
                    unknown_counts[index] -= 1
                    if unknown_counts[index] <= 1:
                        ready.append(index)
            expected_size = evaluate_dim(dim, sizes)
        except (KeyError, ArithmeticError):
            continue
        if expected_size != size:
            raise InputError(f"{location}: expected {format_dim(dim)} = {expected_size}, found {size}")


def _solve(dim: Dim, size: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """Solve a sum or a product for its only unknown symbol: the name and size of the symbol, or None for other expressions."""
    if isinstance(dim, str):
        return None if dim in sizes else (dim, size)
    if not isinstance(dim, Expr) or dim.op not in ("add", "mul"):
        return None
    known_args = [arg for arg in dim.args if all(symbol_name in sizes for symbol_name in symbol_names(arg))]
    unknown_args = [arg for arg in dim.args if arg not in known_args]
    if len(unknown_args) != 1:
        return None
    known_size = evaluate_dim(Expr(op=dim.op, args=tuple(known_args)), sizes)
    if dim.op == "add":
        return _solve(unknown_args[0], size - known_size, sizes)
    return _solve(unknown_args[0], size // known_size, sizes) if known_size else None
