"""The boundary contract at run time: match a call with the signature, and check values against their dtypes, shapes and ranges.

It works on every object with `shape` and `dtype`, such as torch tensors and numpy arrays.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
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
from stagepack.format.tree import (
    UNUSED_VALUE,
    ConstantLeaf,
    NonFiniteLeaf,
    Signature,
    ValueLeaf,
    constant_identity,
    constant_value,
    flatten_tree,
    value_names,
)

# The Python class of a symbolic scalar.
_SCALAR_TYPES: Mapping[str, type] = {"symint": int, "symfloat": float, "symbool": bool}
# Characters of guards that are evaluated for one message: 1 ms or less, also for the guards of a hostile bundle.
_TRIED_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class BoundArgument:
    """The object that a caller passed for a value."""

    location: str  # the location of the object in the call, such as ``batch['input_ids']``, for messages
    value: Any
    # The parameter of the model that it is passed for, if that is the object itself and no container of it.
    parameter: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of an argument, and the dimension that it is compared with. The axis is that of the size in a tensor."""

    location: str
    dim: Dim
    actual: int
    axis: int | None = None


def bind_call(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, BoundArgument]:
    """Match a call with the signature."""
    arguments = _arguments_by_parameter(signature, args, kwargs)
    bound: dict[str, BoundArgument] = {}
    for parameter in signature.parameters:
        if parameter.name not in arguments:
            if any(True for _ in value_names(parameter.tree)):
                raise InputError(f"the argument {parameter.name!r} is missing")
            continue
        for location, leaf, value in flatten_tree(parameter.tree, arguments[parameter.name], parameter.name):
            if isinstance(leaf, ValueLeaf):
                parameter_name = parameter.name if location == parameter.name else None
                first = bound.setdefault(leaf.name, BoundArgument(location, value, parameter_name))
                same = first.value is value or (
                    isinstance(value, bool | int | float) and constant_identity(first.value) == constant_identity(value)
                )
                if not same and leaf.name != UNUSED_VALUE:
                    raise InputError(
                        f"{location} was the same as {first.location} at export: export again to change it"
                    )
            else:
                check_constant(leaf, value, location)
    return bound


def check_values(
    expected: Iterable[Value],
    bound: Mapping[str, BoundArgument],
    symbols: Iterable[Symbol],
    guards: Iterable[Guard] = (),
) -> dict[str, int]:
    """Check values against their dtypes, shapes and ranges, and their sizes against conditions."""
    sizes: dict[str, int] = {}
    origins: dict[str, _Size] = {}
    unchecked: list[_Size] = []
    ranges = {symbol.name: symbol for symbol in symbols}
    for value in expected:
        for size in _checked_sizes(value, bound[value.name]):
            if isinstance(size.dim, int) and size.actual != size.dim:
                shape = f"(shape {format_shape(value.shape)})"
                advice = _advice_on_size(bound[value.name].parameter, size)
                raise InputError(f"{size.location}: expected {size.dim} {shape}, found {size.actual}{advice}")
            if isinstance(size.dim, str):
                if sizes.setdefault(size.dim, size.actual) != size.actual:
                    first = f"{sizes[size.dim]}, the size of {size.dim!r} in {origins[size.dim].location}"
                    raise InputError(f"{size.location}: expected {first}, found {size.actual}")
                origins.setdefault(size.dim, size)
            elif isinstance(size.dim, Expr):
                unchecked.append(size)
    _check_expressions(unchecked, sizes, origins, ranges)
    for symbol_name, symbol in ranges.items():
        if symbol_name in sizes and not size_in_range(symbol, sizes[symbol_name]):
            origin = origins[symbol_name]
            raise InputError(f"{origin.location}: expected {_allowed_sizes(origin.dim, symbol)}, found {origin.actual}")
    guards = list(guards)
    for guard in guards:
        if not guard_holds(guard, sizes):
            raise InputError(_broken_guard(guard, guards, sizes, origins, ranges))
    return sizes


def determined_symbols(values: Iterable[Value], symbols: Iterable[Symbol]) -> AbstractSet[str]:
    """Return the names of the symbols whose sizes `check_values` finds from values."""
    # Any sizes do: which symbols are found depends on the dimensions only.
    sizes = {symbol.name: symbol.example or symbol.min or 1 for symbol in symbols}

    def any_size(dim: Dim) -> int:
        try:
            return evaluate_dim(dim, sizes)
        except ArithmeticError:
            return 0

    sized_values = [value for value in values if value.dtype not in SCALAR_DTYPES or value.expr is not None]
    bound = {}
    for value in sized_values:
        shaped = SimpleNamespace(dtype=value.dtype, shape=list(map(any_size, value.shape)))
        bound[value.name] = BoundArgument(value.name, shaped if value.expr is None else any_size(value.expr))
    return check_values(sized_values, bound, ()).keys()


def _allowed_sizes(dim: Dim, symbol: Symbol) -> str:
    """The sizes that a dimension allows which determines a symbol, such as ``a multiple of 4 from 4 to 128``."""
    if not isinstance(dim, Expr):
        return f"{format_range(symbol)} ({symbol.name!r})"
    if {*symbol_names(dim)} != {symbol.name}:
        return f"{format_dim(dim)} where {symbol.name} is {format_range(symbol)}"
    try:  # Only sums and products are solved, so the size is factor * symbol + offset.
        offset = evaluate_dim(dim, {symbol.name: 0})
        factor = evaluate_dim(dim, {symbol.name: 1}) - offset
    except ArithmeticError:
        return format_dim(dim)
    ends = [None if end is None else factor * end + offset for end in (symbol.min, symbol.max)]
    smallest, largest = ends if factor > 0 else ends[::-1]
    form = format_dim(dim) if offset else f"a multiple of {abs(factor)}"
    if smallest is not None and largest is not None:
        return f"{form} from {smallest} to {largest}"
    return (
        f"{form} of {format_range(Symbol(name=symbol.name, min=smallest, max=largest))}"
        if ends != [None, None]
        else form
    )


def _broken_guard(
    guard: Guard,
    guards: Sequence[Guard],
    sizes: Mapping[str, int],
    origins: Mapping[str, _Size],
    ranges: Mapping[str, Symbol],
) -> str:
    """The message for sizes that do not satisfy a guard; with the nearest that do, if it is about one symbol."""
    guard_symbols = list(dict.fromkeys([*symbol_names(guard.left), *symbol_names(guard.right)]))
    found_sizes = []
    for symbol_name in guard_symbols:
        origin = origins[symbol_name]
        actual = f" is {origin.actual}" if isinstance(origin.dim, Expr) else ""
        found_sizes.append(f"{symbol_name} = {sizes[symbol_name]} ({origin.location}{actual})")
    message = f"expected {format_guard(guard)}, for which the model was captured, found {', '.join(found_sizes)}"
    if len(guard_symbols) > 1:
        return message
    symbol = ranges.get(guard_symbols[0], Symbol(name=guard_symbols[0]))
    near_sizes = _nearest_sizes(origins[symbol.name].dim, symbol, guards, sizes)
    return f"{message}; the nearest sizes that it takes: {', '.join(map(str, near_sizes))}" if near_sizes else message


def _nearest_sizes(dim: Dim, symbol: Symbol, guards: Sequence[Guard], sizes: Mapping[str, int]) -> list[int]:
    """The next smaller and the next larger size of a dimension for which the range of its symbol and all guards hold."""
    near = []
    tries = _TRIED_CHARACTERS // sum(len(format_guard(guard)) for guard in guards)
    for direction in (-1, 1):
        for distance in range(1, tries + 1):
            tried = {**sizes, symbol.name: sizes[symbol.name] + direction * distance}
            if not size_in_range(symbol, tried[symbol.name]) or tried[symbol.name] < 0:
                break
            if all(guard_holds(guard, tried) for guard in guards):
                near.append(evaluate_dim(dim, tried))
                break
    return near


def check_constant(leaf: ConstantLeaf | NonFiniteLeaf, argument: Any, location: str) -> None:
    """Check an argument that was fixed at export."""
    constant = constant_value(leaf)
    if type(argument) is not type(constant) or constant_identity(argument) != constant_identity(constant):
        shown = repr(argument) if isinstance(argument, None | bool | int | float | str) else type(argument).__name__
        advice = _advice_on_constant(constant, argument, location)
        raise InputError(f"{location} was fixed to {constant!r} at export, found {shown}: {advice}")


def _advice_on_constant(constant: object, argument: object, location: str) -> str:
    """How to export a model so that an argument may have this and other values."""
    if type(constant) is int and type(argument) is int:
        flag = f" (--dynamic {location})" if location.isidentifier() else ""
        return f"export again with dynamic_shapes={{{location!r}: torch.export.Dim.DYNAMIC}}{flag}, if the model takes any number"
    if constant is None:
        return (
            f"export again with an example that has {location}, and with an entry point for each if it may be None too"
        )
    return f"export again with an example that has this {location}, and with an entry point for each value"


def _advice_on_size(parameter_name: str | None, size: _Size) -> str:
    """How to export a model so that a size of an argument may change; nothing for the value of a stage, which no caller passes."""
    if parameter_name is None:
        return ""
    dynamic_shapes = f"{{{parameter_name!r}: {{{size.axis}: torch.export.Dim.DYNAMIC}}}}"
    example = " and an example of size 2 or more" if size.dim in (0, 1) else ""  # torch fixes sizes of 0 and 1
    flag = f"--dynamic {parameter_name}:{size.axis}"
    return f": the size is fixed: export again with dynamic_shapes={dynamic_shapes} ({flag}){example} to change it"


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
            # No call can give a parameter anything for which the example had None.
            given_names = [
                parameter.name
                for parameter in signature.parameters
                if parameter.keyword and parameter.tree != ConstantLeaf(None)
            ]
            exported = ", ".join(given_names) or "none"
            raise InputError(f"there is no argument {keyword!r}: the model was exported with {exported}")
        arguments[keyword] = argument
    return arguments


def _checked_sizes(value: Value, argument: BoundArgument) -> Iterable[_Size]:
    """Check type, dtype and rank of an argument; return its sizes."""
    location, passed_value = argument.location, argument.value
    if value.dtype in SCALAR_DTYPES:
        scalar_type = _SCALAR_TYPES[value.dtype]
        if type(passed_value) is not scalar_type:
            raise InputError(
                f"{location}: expected a Python {scalar_type.__name__}, found {type(passed_value).__name__}"
            )
        # Only a symint has an expr, so this object is an int.
        return [_Size(location, value.expr, argument.value)] if value.expr is not None else []
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
        _Size(f"{location}: dimension {index}", dim, size, index)
        for index, (dim, size) in enumerate(zip(value.shape, shape, strict=True))
    ]


def _check_expressions(
    expressions: Sequence[_Size], sizes: dict[str, int], origins: dict[str, _Size], ranges: Mapping[str, Symbol]
) -> None:
    """Check the sizes of dimensions that are arithmetic, and solve each for the last symbol whose size is still unknown.

    A symbol that is solved may let earlier and later expressions be checked. An expression over sizes that depend on the data cannot be;
    assertions in the graph check these.
    """
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    unknown_counts = []
    for index, expression in enumerate(expressions):
        unknown = {symbol_name for symbol_name in symbol_names(expression.dim) if symbol_name not in sizes}
        unknown_counts.append(len(unknown))
        for symbol_name in unknown:
            waiting[symbol_name].append(index)
    ready = deque(index for index, unknown_count in enumerate(unknown_counts) if unknown_count <= 1)
    while ready:
        expression = expressions[ready.popleft()]
        solved = None
        try:
            if (solution := _solve(expression.dim, expression.actual, sizes)) is not None:
                solved, sizes[solved] = solution
                origins[solved] = expression
                for index in waiting.pop(solved):
                    unknown_counts[index] -= 1
                    if unknown_counts[index] <= 1:
                        ready.append(index)
            expected_size = evaluate_dim(expression.dim, sizes)
        except (KeyError, ArithmeticError):
            continue
        if expected_size != expression.actual:
            allowed = f"{format_dim(expression.dim)} = {expected_size}"
            if solved is not None:
                allowed = _allowed_sizes(expression.dim, ranges.get(solved, Symbol(name=solved)))
            raise InputError(f"{expression.location}: expected {allowed}, found {expression.actual}")


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
