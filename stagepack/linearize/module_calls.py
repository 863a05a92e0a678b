"""The calls of modules in a captured program: the nodes that each one made, its arguments and its result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.export.graph_signature import ConstantArgument

from stagepack.capture.module_calls import CallBoundary, TracedCall, TracedCalls, call_boundaries
from stagepack.errors import UnsupportedError
from stagepack.format.graph import ModuleCall, Scope, ValueArg
from stagepack.format.manifest import Signature
from stagepack.format.shapes import Dim
from stagepack.format.traversal import split_call_path
from stagepack.format.tree import UNUSED_VALUE
from stagepack.linearize.body import BodyBuilder, BoundArgument
from stagepack.linearize.container_trees import Leaf
from stagepack.linearize.signature import call_signature
from stagepack.linearize.tables import module_stack

# Calls with more leaves get no signature: a cache of all layers is an argument of each of them.
_MAX_LEAVES = 64


def module_calls(body: BodyBuilder, traced_calls: TracedCalls) -> Iterator[ModuleCall]:
    """Yield the calls of modules whose nodes follow one another."""
    positions: dict[Scope, list[int]] = {}
    for position, source in enumerate(body.sources):
        for scope in module_stack(source):
            positions.setdefault(scope, []).append(position)
    signatures = _CallSignatures(body)
    for scope, call_positions in positions.items():
        first, last = call_positions[0], call_positions[-1]
        if not scope.path or last - first + 1 != len(call_positions):
            continue
        numbered_call = traced_calls.numbered_calls.get(split_call_path(scope.path))
        signature = None if numbered_call is None else signatures.signature(*numbered_call)
        yield ModuleCall(
            path=scope.path, type=scope.type, first=str(first), nodes=len(call_positions), signature=signature
        )


class _CallSignatures:
    """Signatures of module calls, in terms of the values of a program."""

    def __init__(self, body: BodyBuilder) -> None:
        self._symbols = body.tables.symbols
        self._crossing: Mapping[CallBoundary, BoundArgument] = {
            boundary: argument for node, argument in body.arguments.items() for boundary in call_boundaries(node)
        }
        self._size_values: dict[Dim, str] = {}
        node_outputs = (value for node in body.nodes for value in node.outputs if value is not None)
        for value in (*body.inputs, *node_outputs):
            if value.expr is not None:
                self._size_values.setdefault(value.expr, value.name)

    def signature(self, call_number: int, call: TracedCall) -> Signature | None:
        """The signature of a call; None if a bundle cannot hold it."""
        if len(call.arguments) + len(call.results) > _MAX_LEAVES:
            return None
        arguments = self._leaves(call.arguments, call_number, "argument")
        results = self._leaves(call.results, call_number, "result")
        try:
            return call_signature(call, arguments, results)
        except UnsupportedError:
            return None

    def _leaves(self, traced: Sequence[Any], call_number: int, direction: Literal["argument", "result"]) -> list[Leaf]:
        return [
            self._leaf(leaf, self._crossing.get((call_number, direction, leaf_index)))
            for leaf_index, leaf in enumerate(traced)
        ]

    def _leaf(self, traced: Any, argument: BoundArgument) -> Leaf:
        """The value or the constant that a leaf of the trace is; a value that the graph lacks has the name for unused ones."""
        if isinstance(traced, torch.Tensor):
            return argument.name if isinstance(argument, ValueArg) else UNUSED_VALUE
        if isinstance(traced, torch.SymInt):
            size = self._symbols.exact_dim(traced)
            return UNUSED_VALUE if size is None else self._size_values.get(size, UNUSED_VALUE)
        return ConstantArgument(name="", value=traced)
