"""Operators of torch -> rows of the op table: their names, what they write, and what their results alias."""

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node as FxNode

from stagepack.errors import UnsupportedError
from stagepack.format.graph import Op
from stagepack.format.operators import HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, is_denied_operator
from stagepack.torch_internals import (
    HigherOrderOperator,
    OperatorOverload,
    operator_schema,
    storage_identity,
    tree_leaves,
)

# Operators that return their input itself when they do not train; neither their schemas nor their traces show it.
_RETURN_INPUT = (
    "aten.dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_dropout.default",
    "aten.feature_alpha_dropout.default",
)


def op_row(target: Callable[..., Any]) -> Op:
    """Return the row of the op table for the target of a call."""
    if isinstance(target, OperatorOverload):
        if is_denied_operator(str(target)):
            raise UnsupportedError(f"the operator {target} is not allowed in a bundle")
        return _overload_row(target)
    if isinstance(target, HigherOrderOperator):
        operator_name = f"higher_order.{target.name()}"
        if operator_name in HIGHER_ORDER_OPERATORS:
            return Op(name=operator_name)
    else:
        operator_name = _python_name(target)
        if operator_name in PYTHON_OPERATORS:
            return Op(name=operator_name)
    raise UnsupportedError(f"the operator {operator_name} cannot be held by a bundle")


def observed_aliases(node: FxNode) -> Iterator[tuple[int, str]]:
    """Yield which results of a call share storage with its arguments, as the capture observed it.

    Some schemas do not say it: those of einsum and meshgrid, which return views.
    """
    if not isinstance(node.target, OperatorOverload):
        return
    schema = operator_schema(node.target)
    positional = {parameter.name: value for parameter, value in zip(schema.arguments, node.args, strict=False)}
    parameter_of_storage = {
        storage: parameter_name
        for parameter_name, argument in (positional | node.kwargs).items()
        for storage in _storages(fx.map_arg(argument, _meta))
    }
    meta: Any = node.meta.get("val")
    for result_index, result in enumerate(meta if len(schema.returns) > 1 else [meta]):
        for storage in _storages(result):
            if storage in parameter_of_storage:
                yield result_index, parameter_of_storage[storage]


def _overload_row(target: OperatorOverload) -> Op:
    schema = operator_schema(target)
    parameters_of_set: dict[str, list[str]] = {}
    mutates = []
    for parameter in schema.arguments:
        if parameter.alias_info is not None:
            if parameter.alias_info.is_write:
                mutates.append(parameter.name)
            for alias_set in parameter.alias_info.before_set:
                parameters_of_set.setdefault(alias_set, []).append(parameter.name)
    aliases = []
    for result_index, result in enumerate(schema.returns):
        # `Tensor(a -> *)` has no set at its result: split and chunk, whose items are views of the input.
        alias_sets = (result.alias_info.before_set or parameters_of_set) if result.alias_info is not None else ()
        for alias_set in sorted(alias_sets):
            aliases += [(result_index, parameter_name) for parameter_name in parameters_of_set.get(alias_set, [])]
    if str(target) in _RETURN_INPUT:
        aliases.append((0, schema.arguments[0].name))
    return Op(
        name=str(target),
        schema=str(schema),
        parameters=tuple(parameter.name for parameter in schema.arguments),
        mutates=tuple(mutates),
        aliases=tuple(aliases),
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )


def _meta(node: FxNode) -> Any:
    return node.meta.get("val")


def _storages(values: object) -> Iterator[int]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield storage_identity(leaf)


def _python_name(target: Callable[..., Any]) -> str:
    module_name = getattr(target, "__module__", "") or ""
    function_name = getattr(target, "__name__", str(target))
    if getattr(operator, function_name, None) is target:
        return f"operator.{function_name}"
    if module_name == builtins.__name__:
        return f"builtins.{function_name}"
    # torch.sym_sqrt calls itself _sym_sqrt.
    return f"{module_name.split('.')[0]}.{function_name.lstrip('_')}"
