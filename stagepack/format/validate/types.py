"""The rules on signatures (SPEC T1, T4 and T5), and on symbols, dimensions and types of values, in manifests and graphs (S1 to S4)."""

from collections.abc import Iterator

from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.rules import WORD_PATTERN, BrokenRule, format_names, is_identifier
from stagepack.format.shapes import (
    OPERATIONS,
    RELATIONS,
    Dim,
    Expr,
    Guard,
    Symbol,
    format_guard,
    format_range,
    guard_holds,
    size_in_range,
)
from stagepack.format.tree import DictTree, ObjectTree, SequenceTree, Signature, Tree, child_trees, is_field_name

# Operations of two or more operands. The others have exactly two.
_VARIADIC_OPERATIONS = frozenset({"add", "mul", "max", "min"})


def check_depth(signature: Signature, location: str) -> Iterator[BrokenRule]:
    """Yield a problem if the containers of a signature are nested too deep (L2). `check_signature` must not be called then."""
    if any(_too_deep(tree) for tree in signature.trees):
        yield "L2", location, f"containers are nested deeper than {limits.NESTING_DEPTH}"


def check_signature(signature: Signature, location: str) -> Iterator[BrokenRule]:
    """Yield the problems of a signature."""
    parameter_names = [parameter.name for parameter in signature.parameters]
    if len(set(parameter_names)) != len(parameter_names) or any(
        len(parameter_name) > limits.NAME_CHARACTERS for parameter_name in parameter_names
    ):
        yield "T1", location, "duplicate parameter, or a name that is too long"
    positional = [parameter.positional for parameter in signature.parameters]
    if positional != sorted(positional, reverse=True):
        yield "T1", location, "a positional parameter follows one that is not positional"
    if any(not parameter.positional and not parameter.keyword for parameter in signature.parameters):
        yield "T1", location, "a parameter is neither positional nor a keyword"
    for tree in signature.trees:
        yield from _check_containers(tree, location)


def _check_containers(tree: Tree, location: str) -> Iterator[BrokenRule]:
    if isinstance(tree, SequenceTree) and tree.maxlen is not None:
        if tree.kind != "deque" or tree.maxlen < len(tree.items):
            yield "T4", location, f"a {tree.kind} of {len(tree.items)} items has the maxlen {tree.maxlen}"
    elif isinstance(tree, DictTree | ObjectTree):
        keys = [key for key, _ in (tree.items if isinstance(tree, DictTree) else tree.fields)]
        if len(set(keys)) != len(keys):
            yield "T4", location, f"duplicate key in a container: {format_names(keys)}"
    if isinstance(tree, DictTree) and tree.factory is not None and tree.kind != "defaultdict":
        yield "T4", location, f"a {tree.kind} has a factory"
    if isinstance(tree, ObjectTree) and len(tree.class_name) > limits.NAME_CHARACTERS:
        yield "T4", location, "the name of a class is too long"
    if isinstance(tree, ObjectTree) and tree.kind == "tuple":
        wrong_names = [
            field_name for index, (field_name, _) in enumerate(tree.fields) if not is_field_name(field_name, index)
        ]
        if wrong_names:
            yield (
                "T5",
                location,
                f"expected identifiers as the names of the items of a tuple, found {format_names(wrong_names)}",
            )
    for child in child_trees(tree):
        yield from _check_containers(child, location)


def _too_deep(tree: Tree, depth: int = 0) -> bool:
    return depth > limits.NESTING_DEPTH or any(_too_deep(child, depth + 1) for child in child_trees(tree))


def check_symbols(symbols: tuple[Symbol, ...]) -> Iterator[BrokenRule]:
    """Yield the problems of a table of symbols (S1)."""
    seen: set[str] = set()
    for symbol in symbols:
        if not is_identifier(symbol.name) or symbol.name in seen:
            yield "S1", "symbols", f"{symbol.name[:80]!r} is not an identifier, or is a duplicate"
        seen.add(symbol.name)
        location = f"symbol {symbol.name[:80]}"
        if symbol.min is not None and symbol.max is not None and symbol.min > symbol.max:
            yield "S1", location, f"min {symbol.min} is greater than max {symbol.max}"
        if symbol.example is not None and not size_in_range(symbol, symbol.example):
            yield "S1", location, f"expected an example of {format_range(symbol)}, found {symbol.example}"


def check_guards(guards: tuple[Guard, ...], symbols: tuple[Symbol, ...]) -> Iterator[BrokenRule]:
    """Yield the problems of the conditions on sizes (S4)."""
    names = {symbol.name for symbol in symbols}
    examples = {symbol.name: symbol.example for symbol in symbols if symbol.example is not None}
    if len(guards) > limits.GUARDS:
        yield "L1", "guards", f"expected at most {limits.GUARDS}, found {len(guards)}"
        return
    for index, guard in enumerate(guards):
        location = f"guard {index}"
        problems = [
            *check_dim(guard.left, names, f"{location}, left"),
            *check_dim(guard.right, names, f"{location}, right"),
        ]
        yield from problems
        if guard.relation not in RELATIONS:
            yield "S4", location, f"{guard.relation[:80]!r} is not a relation"
        elif not problems and not guard_holds(guard, examples, without_value=True):
            yield "S4", location, f"expected {format_guard(guard)[:200]}, which the sizes of the example break"


def check_dim(dim: Dim, symbols: set[str], location: str, depth: int = 0) -> Iterator[BrokenRule]:
    """Yield the problems of a dimension (S2, S3, L1, L2)."""
    if isinstance(dim, str):
        if dim not in symbols:
            yield "S2", location, f"the symbol {dim[:80]!r} is not declared"
    elif not isinstance(dim, Expr):
        if abs(dim) > limits.TENSOR_ELEMENTS:
            yield "S2", location, f"expected at most {limits.TENSOR_ELEMENTS}, found {dim}"
    elif depth >= limits.NESTING_DEPTH:
        yield "L2", location, f"arithmetic is nested deeper than {limits.NESTING_DEPTH}"
    elif len(dim.args) > limits.EXPR_TERMS:
        yield "L1", location, f"expected at most {limits.EXPR_TERMS} operands of one operation, found {len(dim.args)}"
    elif dim.op not in OPERATIONS or len(dim.args) < 2 or (len(dim.args) > 2 and dim.op not in _VARIADIC_OPERATIONS):
        yield "S3", location, f"{dim.op[:80]!r} of {len(dim.args)} operands is not an operation"
    else:
        for arg in dim.args:
            yield from check_dim(arg, symbols, location, depth + 1)


def check_type(value: Value, symbols: set[str], rule: str, location: str) -> Iterator[BrokenRule]:
    """Yield the problems of the dtype, the shape and the expr of a value or an edge."""
    is_scalar = value.dtype in SCALAR_DTYPES
    if value.dtype not in ITEM_SIZE and not is_scalar and not WORD_PATTERN.fullmatch(value.dtype):
        yield rule, location, f"{value.dtype[:80]!r} is not a dtype"
    if (is_scalar and value.shape) or (value.dtype != "symint" and value.expr is not None):
        yield rule, location, f"a {value.dtype[:80]} has a shape or an expr"
    if len(value.shape) > limits.RANK:
        yield "L1", location, f"expected at most {limits.RANK} dimensions, found {len(value.shape)}"
    for dim in value.shape:
        yield from check_dim(dim, symbols, location)
        if isinstance(dim, int) and dim < 0:
            yield "S2", location, f"expected a size of at least 0, found {dim}"
    if value.expr is not None:
        yield from check_dim(value.expr, symbols, location)
