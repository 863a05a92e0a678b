"""The arguments and the result of each call of a module, by a mark on the nodes of a trace.

The ``preserve_module_call_signature`` of torch fails on a module that is called twice in different ways.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stagepack.format.rules import split_call_path
from stagepack.torch_internals import (
    EXPORT_ROOT,
    TreeSpec,
    traced_module_calls,
    traced_node,
    tree_flatten,
)

# A call of a module: the path of the module, and the text behind ``@`` of a call that is not its first.
CallKey = tuple[str, str]
# Where a value crosses the boundary of a module call: the number of the call, the direction, and the number of the leaf.
CallBoundary = tuple[int, Literal["argument", "result"], int]
_BOUNDARIES_KEY = "stagepack_calls"  # of a node's `meta`


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call of a module."""

    parameters: Mapping[str, inspect.Parameter]
    arguments: list[Any]
    arguments_spec: TreeSpec
    results: list[Any]
    results_spec: TreeSpec


class TracedCalls:
    """The calls of modules in a trace."""

    def __init__(self) -> None:
        # Each call with its number in `CallBoundary`. If a call is traced several times, the last trace counts.
        self.numbered_calls: dict[CallKey, tuple[int, TracedCall]] = {}
        self._call_count = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls of modules in all traces of torch within the ``with`` block."""
        with traced_module_calls(self._record):
            yield

    def _record(
        self, tracer: Any, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any, trace_call: Callable[..., Any]
    ) -> Any:
        call_number = self._call_count
        self._call_count += 1
        arguments, arguments_spec = _flatten((args, kwargs))
        _mark_nodes(tracer, arguments, call_number, "argument")
        module_paths: list[str] = []

        def forward_with_path(*forward_args: Any, **forward_kwargs: Any) -> Any:
            module_paths.extend(tracer.module_stack)
            return forward(*forward_args, **forward_kwargs)

        depth = len(tracer.module_stack)
        try:
            result = trace_call(tracer, module, forward_with_path, args, kwargs)
        except BaseException:
            # Code of the model may catch the error, and go on; torch leaves the module on the stack.
            while len(tracer.module_stack) > depth:
                tracer.module_stack.popitem()
            raise
        results, results_spec = _flatten(result)
        _mark_nodes(tracer, results, call_number, "result")
        if module_paths:
            call = TracedCall(
                parameters=inspect.signature(module.forward).parameters,
                arguments=arguments,
                arguments_spec=arguments_spec,
                results=results,
                results_spec=results_spec,
            )
            self.numbered_calls[_call_key(module_paths[-1])] = (call_number, call)
        return result


def call_boundaries(node: torch.fx.Node) -> list[CallBoundary]:
    """The boundaries of module calls that the value of a node crosses."""
    return list(node.meta.get(_BOUNDARIES_KEY, ()))


def _flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten arguments or results. A container that its library registered, and cannot take apart while it is traced, is a leaf."""
    try:
        return tree_flatten(tree)
    except (TypeError, ValueError, RecursionError):
        return tree_flatten(tree, lambda value: type(value) not in (tuple, list, dict))


def _call_key(call_path: str) -> CallKey:
    module_path, occurrence = split_call_path(call_path)
    return module_path.removeprefix(EXPORT_ROOT).removeprefix("."), occurrence


def _mark_nodes(tracer: Any, leaves: list[Any], call_number: int, direction: str) -> None:
    for leaf_number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            node = traced_node(tracer, leaf)
            if node is not None:
                boundaries = node.meta.setdefault(_BOUNDARIES_KEY, [])
                boundaries.append((call_number, direction, leaf_number))
