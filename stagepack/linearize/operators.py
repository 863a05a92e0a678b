"""torch operators -> rows of the op table: what they are called, what they write, and what their results alias."""

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from stagepack.errors import UnsupportedError
from stagepack.format.graph import Op
from stagepack.format.operators import HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, is_denied_operator

# They give their input back when they do not train; neither their schemas nor their traces show it.
_GIVE_BACK = (
    "aten.dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_dropout.default",
    "aten.feature_alpha_dropout.default",
)


def describe(target: Callable[..., Any]) -> Op:
    """The row of the op table for the target of a call.

    Raises:
        UnsupportedError: no bundle can hold it.
    """
    if isinstance(target, torch._ops.OpOverload):
        if is_denied_operator(str(target)):
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
    if str(target) in _GIVE_BACK:
        aliases.append((0, schema.arguments[0].name))
    return Op(
        name=str(target),
        schema=str(schema),
        parameters=tuple(parameter.name for parameter in schema.arguments),
        mutates=tuple(mutates),
        aliases=tuple(aliases),
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )


def seen_aliases(node: FxNode) -> Iterator[tuple[int, str]]:
    """Yield which results of a call lie in the memory of what was given to it: result number, parameter.

    Some schemas keep silent on it: those of einsum and meshgrid, which give views.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    given = {parameter.name: value for parameter, value in zip(node.target._schema.arguments, node.args, strict=False)}
    lies_in = {
        storage: name
        for name, value in (given | node.kwargs).items()
        for storage in _storages(fx.map_arg(value, _meta))
    }
    meta: Any = node.meta.get("val")
    for index, result in enumerate(meta if len(node.target._schema.returns) > 1 else [meta]):
        for storage in _storages(result):
            if storage in lies_in:
                yield index, lies_in[storage]


def _meta(node: FxNode) -> Any:
    return node.meta.get("val")


def _storages(value: object) -> Iterator[int]:
    """Yield what tells the storages of the tensors in a value apart."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()._cdata  # noqa: SLF001 - what copy.deepcopy of torch goes by, too


def _python_name(target: Callable[..., Any]) -> str:
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if module == builtins.__name__:
        return f"builtins.{name}"
    return f"{module.split('.')[0]}.{name.lstrip('_')}"  # torch.sym_sqrt calls itself _sym_sqrt
