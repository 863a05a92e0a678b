"""Names of operators -> the operators of the torch that runs here.

Only ATen and prims, the closed sets of Python and higher-order operators, and the namespaces that the caller names.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from stagepack.errors import OperatorError
from stagepack.format.graph import Op
from stagepack.format.operators import ALLOWED_NAMESPACES, is_denied_operator, operator_namespace
from stagepack.torch_internals import HigherOrderOperator, OperatorOverload, is_compatible_schema, operator_schema

_MODULES = {"operator": operator, "math": math, "torch": torch, "higher_order": torch.ops.higher_order}


def resolve(ops: Iterable[Op], allow: Collection[str], where: str) -> list[Callable[..., Any]]:
    """Find every operator of a table.

    Raises:
        OperatorError: operators are missing here, denied, of a namespace that the caller did not allow, or have another
            schema; all of them are named.
    """
    found = []
    problems = []
    allowed = {allow} if isinstance(allow, str) else allow  # a text would allow every part of itself
    for op in ops:
        try:
            found.append(_find(op, allowed))
        except OperatorError as error:
            problems.append(str(error))
    if problems:
        raise OperatorError(f"{where}: {'; '.join(problems)}")
    return found


def check_call(name: str, target: Callable[..., Any], positional: int, keywords: Collection[str]) -> None:
    """Refuse a call that the operator's schema does not take; what higher-order operators take, only they can tell.

    Raises:
        OperatorError: an argument is missing, unknown or given twice, or there are too many by position.
    """
    if isinstance(target, HigherOrderOperator):
        return
    parameters = _parameters(target)
    by_position = [parameter.name for parameter in parameters if parameter.by_position]
    given = {*by_position[:positional], *keywords}
    fits = positional <= len(by_position) and len(given) == positional + len(keywords)
    fits = fits and {parameter.name for parameter in parameters if parameter.by_name}.issuperset(keywords)
    if not fits or any(parameter.needed and parameter.name not in given for parameter in parameters):
        takes = ", ".join(parameter.name for parameter in parameters)
        found = f"{positional} by position and {sorted(keywords)} by name"
        raise OperatorError(f"the operator {name} takes {takes}; a node gives it {found}")


class _Parameter(NamedTuple):
    name: str
    by_position: bool
    by_name: bool
    needed: bool


@functools.cache
def _parameters(target: Callable[..., Any]) -> list[_Parameter]:
    """The parameters of an operator in order."""
    if isinstance(target, OperatorOverload):
        return [
            _Parameter(argument.name, not argument.kwarg_only, by_name=True, needed=not argument.has_default_value())
            for argument in operator_schema(target).arguments
        ]
    return [
        _Parameter(
            parameter.name, True, parameter.kind != parameter.POSITIONAL_ONLY, parameter.default is parameter.empty
        )
        for parameter in inspect.signature(target).parameters.values()
    ]


def _find(op: Op, allow: Collection[str]) -> Callable[..., Any]:
    space = operator_namespace(op.name)
    if is_denied_operator(op.name):
        raise OperatorError(f"the operator {op.name} is not allowed in a bundle [G11]")
    if space not in ALLOWED_NAMESPACES and space not in allow:
        raise OperatorError(
            f"the operator {op.name} is of the namespace {space!r}: allow it with allow_ops=[{space!r}] (--allow-ops {space})"
        )
    if space in _MODULES:
        return _python(op.name)
    return _overload(op)


def _python(name: str) -> Callable[..., Any]:
    space, _, rest = name.partition(".")
    target = getattr(_MODULES[space], rest, None)
    if target is None:
        raise OperatorError(f"the operator {name} does not exist in torch {torch.__version__}")
    found: Callable[..., Any] = target
    return found


def _overload(op: Op) -> OperatorOverload:
    space, name, overload = (*op.name.split("."), "default")[:3]
    packet = getattr(getattr(torch.ops, space), name, None)
    target = getattr(packet, overload, None)
    if not isinstance(target, OperatorOverload):
        hint = "" if space in ALLOWED_NAMESPACES else ": import the library that registers it"
        raise OperatorError(f"the operator {op.name} does not exist in torch {torch.__version__}{hint}")
    schema = operator_schema(target)
    if str(schema) != op.schema and not is_compatible_schema(schema, op.schema):
        raise OperatorError(
            f"the operator {op.name} has the schema {schema} here, the bundle was made with {op.schema}"
        )
    return target
