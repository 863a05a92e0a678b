"""The operators of a graph in the torch that runs here.

Allowed are the operators of ATen and prims that are judged to be harmless, the closed sets of Python and higher-order operators, and what
the caller names.

Python operators on numbers of a graph have bounded results: a size, and whatever is computed from sizes, fits 64 bits. Python computes
integers of any length, and holds the interpreter meanwhile: ``9 ** 10**9`` takes hours, and so does a chain of products. Sequences, which
these operators would repeat, join or fill in, are refused. Symbolic integers, which a compiler traces, pass unchecked.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from stagepack.argument_guards import guarded_operator
from stagepack.errors import OperatorError
from stagepack.format.graph import DeviceArg, Graph, Op
from stagepack.format.operator_schema import is_backward_compatible, parse_schema
from stagepack.format.operators import (
    ALLOWED_NAMESPACES,
    REASONS,
    is_denied_operator,
    is_permitted,
    needed_permission,
    operator_namespace,
    operator_verdict,
)
from stagepack.format.traversal import node_arguments
from stagepack.torch_internals import HigherOrderOperator, OperatorOverload, has_kernel, operator_schema

_LARGEST: Final = 2**63
_PYTHON_NAMESPACES = {"operator": operator, "math": math, "torch": torch, "higher_order": torch.ops.higher_order}


def resolve_operators(op_table: Iterable[Op], allow_ops: Collection[str], graph_name: str) -> list[Callable[..., Any]]:
    """Return the operator of each entry of an op table; see `stagepack.load` for `allow_ops`."""
    operators = []
    problems = []
    allowed = {allow_ops} if isinstance(allow_ops, str) else allow_ops  # a string would allow each of its substrings
    for op in op_table:
        try:
            operators.append(_resolve(op, allowed))
        except OperatorError as error:
            problems.append(str(error))
    if problems:
        raise OperatorError(f"{graph_name}: {'; '.join(problems)}")
    return operators


def require_kernels(graph: Graph, operators: Iterable[Callable[..., Any]], device_type: str, captured_on: str) -> None:
    """Refuse operators that do not run on the device of a stage, such as products with weights that are packed for another one.

    Where the model itself names a device, its operators may run there, and are not judged.
    """
    overloads = map(inspect.unwrap, operators)
    missing = [
        op.name
        for op, overload in zip(graph.ops, overloads, strict=True)
        if isinstance(overload, OperatorOverload) and not has_kernel(overload, device_type)
    ]
    if not missing:
        return
    nodes = (*graph.nodes, *(node for subgraph in graph.subgraphs for node in subgraph.nodes))
    leaves = (leaf for node in nodes for leaf in node_arguments(node))
    if not any(isinstance(leaf, DeviceArg) and leaf.name is not None for leaf in leaves):
        raise OperatorError(
            f"the operator {missing[0]} has no kernel for {device_type} in torch {torch.__version__}: load the bundle on a device that has "
            f"one (it was captured on {captured_on}), or export the model anew, with weights that are quantized for {device_type}"
        )


def check_call(
    operator_name: str, target: Callable[..., Any], positional_count: int, keywords: Collection[str]
) -> None:
    """Check the arguments of a call against the schema of the operator. Higher-order operators, which have none, are not checked."""
    if isinstance(target, HigherOrderOperator):
        return
    parameters = _parameters(target)
    by_position = [parameter.name for parameter in parameters if parameter.by_position]
    by_name = {parameter.name for parameter in parameters if parameter.by_name}
    passed = {*by_position[:positional_count], *keywords}
    is_unique = positional_count <= len(by_position) and len(passed) == positional_count + len(keywords)
    is_complete = all(parameter.name in passed for parameter in parameters if parameter.is_required)
    if not is_unique or not is_complete or not by_name.issuperset(keywords):
        expected = ", ".join(parameter.name for parameter in parameters)
        raise OperatorError(
            f"the operator {operator_name} takes {expected}; "
            f"a node passes {positional_count} arguments by position and {sorted(keywords)} by name"
        )


class _Parameter(NamedTuple):
    name: str
    by_position: bool
    by_name: bool
    is_required: bool


@functools.cache
def _parameters(target: Callable[..., Any]) -> list[_Parameter]:
    """The parameters of an operator, in order."""
    overload = inspect.unwrap(target)
    if isinstance(overload, OperatorOverload):
        return [
            _Parameter(
                argument.name,
                by_position=not argument.kwarg_only,
                by_name=True,
                is_required=not argument.has_default_value(),
            )
            for argument in operator_schema(overload).arguments
        ]
    return [
        _Parameter(
            parameter.name,
            by_position=True,
            by_name=parameter.kind != parameter.POSITIONAL_ONLY,
            is_required=parameter.default is parameter.empty,
        )
        for parameter in inspect.signature(target).parameters.values()
    ]


def _resolve(op: Op, allowed: Collection[str]) -> Callable[..., Any]:
    namespace = operator_namespace(op.name)
    if is_denied_operator(op.name):
        raise OperatorError(f"the operator {op.name} is not allowed in a bundle [G11]")
    if namespace in _PYTHON_NAMESPACES:
        return BOUNDED_OPERATORS.get(op.name) or _python_operator(op.name)
    permission = None if is_permitted(op.name, allowed) else needed_permission(op.name)
    flag = f"pass --allow-ops {permission} (in Python allow_ops=[{permission!r}])"
    if permission == namespace:
        raise OperatorError(
            f"the operator {op.name} is of the namespace {namespace!r}, whose operators run only if you allow it: if you know and trust "
            f"the library that registers them, import it (--import MODULE) and {flag}"
        )
    overload = _overload(op)
    if permission is not None:
        reason = REASONS.get(operator_verdict(op.name) or "", "is not judged in this version of stagepack")
        raise OperatorError(f"the operator {op.name} {reason} [G11]: if you trust the bundle, {flag}")
    if overload is torch.ops.aten.detach_.default:
        # torch detaches no view in place, which a value from another process may be. Later nodes use the result alone.
        return torch.ops.aten.detach.default
    return guarded_operator(overload)


def _python_operator(operator_name: str) -> Callable[..., Any]:
    namespace, _, attribute_name = operator_name.partition(".")
    target: Callable[..., Any] | None = getattr(_PYTHON_NAMESPACES[namespace], attribute_name, None)
    if target is None:
        raise OperatorError(f"the operator {operator_name} does not exist in torch {torch.__version__}")
    return target


def _overload(op: Op) -> OperatorOverload:
    namespace, operator_name, overload_name = (*op.name.split("."), "default")[:3]
    packet = getattr(getattr(torch.ops, namespace), operator_name, None)
    overload = getattr(packet, overload_name, None)
    if not isinstance(overload, OperatorOverload):
        hint = "" if namespace in ALLOWED_NAMESPACES else ": import the library that registers it"
        raise OperatorError(f"the operator {op.name} does not exist in torch {torch.__version__}{hint}")
    schema = str(operator_schema(overload))
    if schema != op.schema and not _is_compatible(schema, op.schema):
        raise OperatorError(
            f"the operator {op.name} has the schema {schema} in torch {torch.__version__}, the bundle was made with {op.schema}"
        )
    return overload


def _is_compatible(schema: str, earlier_schema: str) -> bool:
    """Whether calls that were made under an earlier schema mean the same; False for a text that is no schema."""
    parsed, earlier = parse_schema(schema), parse_schema(earlier_schema)
    return parsed is not None and earlier is not None and is_backward_compatible(parsed, earlier)


def bounded_add(a: Any, b: Any, /) -> Any:
    """Return ``a + b``."""
    _refuse_sequences(a, b)
    return _bounded("sum", operator.add(a, b), a, b)


def bounded_sub(a: Any, b: Any, /) -> Any:
    """Return ``a - b``."""
    return _bounded("difference", operator.sub(a, b), a, b)


def bounded_mod(a: Any, b: Any, /) -> Any:
    """Return ``a % b``."""
    _refuse_sequences(a, b)
    return operator.mod(a, b)


def bounded_mul(a: Any, b: Any, /) -> Any:
    """Return ``a * b``."""
    _refuse_sequences(a, b)
    return _bounded("product", operator.mul(a, b), a, b)


def bounded_pow(a: Any, b: Any, /) -> Any:
    """Return ``a ** b``."""
    if _are_integers(a, b) and abs(a) > 1 and b > _LARGEST.bit_length():
        raise _overflow("power")
    return _bounded("power", operator.pow(a, b), a, b)


def bounded_lshift(a: Any, b: Any, /) -> Any:
    """Return ``a << b``."""
    if _are_integers(a, b) and a and b > _LARGEST.bit_length():
        raise _overflow("shifted integer")
    return _bounded("shifted integer", operator.lshift(a, b), a, b)


# By the name of the operator in a graph.
BOUNDED_OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "operator.add": bounded_add,
    "operator.lshift": bounded_lshift,
    "operator.mod": bounded_mod,
    "operator.mul": bounded_mul,
    "operator.pow": bounded_pow,
    "operator.sub": bounded_sub,
}


def _bounded(result_name: str, result: Any, a: Any, b: Any) -> Any:
    if _are_integers(a, b) and abs(result) > _LARGEST:
        raise _overflow(result_name)
    return result


def _are_integers(a: Any, b: Any) -> bool:
    """Whether both are integers of Python. False while a compiler traces: the answer would become a condition on the sizes of calls."""
    return not torch.compiler.is_compiling() and isinstance(a, int) and isinstance(b, int)


def _refuse_sequences(a: Any, b: Any) -> None:
    if isinstance(a, str | list | tuple) or isinstance(b, str | list | tuple):
        raise TypeError(f"expected numbers, found {type(a).__name__} and {type(b).__name__}")


def _overflow(result_name: str) -> OverflowError:
    return OverflowError(f"expected integers of at most 64 bits, found a {result_name} whose magnitude is above 2^63")
