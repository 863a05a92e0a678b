"""torch operators -> rows of the op table: what they are called, what they write, and what their results alias."""

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from stagepack.errors import UnsupportedError
from stagepack.format.graph import Op
from stagepack.format.operators import HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, is_denied


def describe(target: Callable[..., Any]) -> Op:
    """The row of the op table for the target of a call.

    Raises:
        UnsupportedError: no bundle can hold it.
    """
    if isinstance(target, torch._ops.OpOverload):
        if is_denied(str(target)):
            raise UnsupportedError(f"the operator {target} is not allowed in a bundle")
        return _overload(target)
    if isinstance(target, HigherOrderOperator):
        name = f"higher_order.{target.name()}"
        if name in HIGHER_ORDER_OPERATORS:
            return Op(name=name)
    else:
        name = _python_name(target)
        if name in PYTHON_OPERATORS:
            return Op(name=name)
    raise UnsupportedError(f"the operator {name} cannot be held by a bundle")


def _overload(target: torch._ops.OpOverload) -> Op:
    schema = target._schema
    places: dict[str, list[str]] = {}
    mutates = []
    for parameter in schema.arguments:
        if parameter.alias_info is not None:
            if parameter.alias_info.is_write:
                mutates.append(parameter.name)
            for place in parameter.alias_info.before_set:
                places.setdefault(place, []).append(parameter.name)
    aliases = []
    for index, result in enumerate(schema.returns):
        found = result.alias_info
        # `Tensor(a -> *)` says nothing at its result: split and chunk, whose items are views of the input.
        sets = (found.before_set or places) if found is not None else ()
        aliases += [(index, name) for place in sorted(sets) for name in places.get(place, [])]
    return Op(
        name=str(target),
        schema=str(schema),
        parameters=tuple(parameter.name for parameter in schema.arguments),
        mutates=tuple(mutates),
        aliases=tuple(aliases),
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )


def _python_name(target: Callable[..., Any]) -> str:
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if module == builtins.__name__:
        return f"builtins.{name}"
    return f"{module.split('.')[0]}.{name.lstrip('_')}"  # torch.sym_sqrt calls itself _sym_sqrt
