"""The calls of modules: which nodes each one made, and what it was given and gave back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument

from stagepack.capture.module_calls import CallBoundary, TracedCall, TracedCalls, call_boundaries
from stagepack.errors import UnsupportedError
from stagepack.format.graph import Argument, ModuleCall, Scope, ValueArg
from stagepack.format.shapes import Dim
from stagepack.format.signature import Signature
from stagepack.format.traversal import split_call_path
from stagepack.format.tree import UNUSED_VALUE
from stagepack.linearize.body import BodyBuilder
from stagepack.linearize.signature import Leaf, call_signature
from stagepack.linearize.tables import module_stack

_MOST_LEAVES = 64  # of a call: a cache of all layers is given to each of them


def module_calls(body: BodyBuilder, traced: TracedCalls) -> Iterator[ModuleCall]:
    """Yield the calls of modules whose nodes stand together; without a signature where `traced` does not know the call."""
    numbers: dict[Scope, list[int]] = {}
    for number, source in enumerate(body.sources):
        for scope in module_stack(source):
            numbers.setdefault(scope, []).append(number)
    leaves = {mark: argument for node, argument in body.env.items() for mark in call_boundaries(node)}
    sizes: dict[Dim, str] = {}
    for value in (*body.inputs, *(value for node in body.nodes for value in node.outputs if value is not None)):
        if value.expr is not None:
            sizes.setdefault(value.expr, value.name)
    for scope, found in numbers.items():
        if not scope.path or found[-1] - found[0] + 1 != len(found):
            continue
        known = traced.numbered_calls.get(split_call_path(scope.path))
        signature = None if known is None else _signature(*known, body, leaves, sizes)
        yield ModuleCall(path=scope.path, type=scope.type, first=str(found[0]), nodes=len(found), signature=signature)


def _signature(
    number: int,
    call: TracedCall,
    body: BodyBuilder,
    known: Mapping[CallBoundary, Argument | list[Argument]],
    sizes: Mapping[Dim, str],
) -> Signature | None:
    """The signature of a call; None where it is nothing that a bundle can hold."""
    if len(call.arguments) + len(call.results) > _MOST_LEAVES:
        return None

    def leaf(found: Any, argument: object) -> Leaf:
        if isinstance(found, torch.Tensor):
            return argument.name if isinstance(argument, ValueArg) else UNUSED_VALUE
        if isinstance(found, torch.SymInt):
            size = body.tables.symbols.known(found)
            return UNUSED_VALUE if size is None else sizes.get(size, UNUSED_VALUE)
        return ConstantArgument(name="", value=found)

    def named(found: Sequence[Any], kind: Any) -> list[Leaf]:
        return [leaf(part, known.get((number, kind, place))) for place, part in enumerate(found)]

    try:
        return call_signature(call, named(call.arguments, "argument"), named(call.results, "result"))
    except UnsupportedError:
        return None
