"""What each module is given and gives back, while ``torch.export`` traces a model.

The trace itself forgets it. torch's ``preserve_module_call_signature`` writes it into the graph, but fails on a module that is called
twice in different ways. Here the nodes of the trace get a mark each time that a module is given their value or gives it back.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from stagepack.format.traversal import split_call_path

# A call of a module: the path of the module, and the text behind ``@`` of a call that is not its first.
CallKey = tuple[str, str]
_MARKS = "stagepack_calls"
_ROOT = "_export_root"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call of a module.

    Attributes:
        parameters: of the module's ``forward``.
        given: the leaves of what it was given by position and by name.
        given_spec: the containers of these.
        result: the leaves of what it gave back.
        result_spec: the containers of these.
    """

    parameters: Mapping[str, inspect.Parameter]
    given: list[Any]
    given_spec: pytree.TreeSpec
    result: list[Any]
    result_spec: pytree.TreeSpec


# Where a value stands in a call: the number of the call, whether it is given or a result, and the number of the leaf.
CallBoundary = tuple[int, Literal["given", "result"], int]


class TracedCalls:
    """The calls of a trace.

    Attributes:
        of: the calls, each with the number that marks have for it; of several traces, the last one that made the call counts.
    """

    def __init__(self) -> None:
        """Start with no calls."""
        self.of: dict[CallKey, tuple[int, TracedCall]] = {}
        self._count = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls of modules in whatever torch traces."""
        tracer = proxy_tensor._ModuleStackTracer
        trace = tracer.call_module

        def call_module(this: Any, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return self._record(this, module, forward, (args, kwargs), trace)

        with mock.patch.object(tracer, "call_module", call_module):
            yield

    def _record(
        self, tracer: Any, module: torch.nn.Module, forward: Any, given: tuple[Any, Any], trace: Callable[..., Any]
    ) -> Any:
        number = self._count
        self._count += 1
        leaves, spec = pytree.tree_flatten(given)
        _mark(tracer, leaves, number, "given")
        keys: list[str] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            keys.extend(tracer.module_stack)
            return forward(*args, **kwargs)

        result = trace(tracer, module, called, *given)
        results, result_spec = pytree.tree_flatten(result)
        _mark(tracer, results, number, "result")
        if keys:
            self.of[_key(keys[-1])] = (
                number,
                TracedCall(
                    parameters=inspect.signature(module.forward).parameters,
                    given=leaves,
                    given_spec=spec,
                    result=results,
                    result_spec=result_spec,
                ),
            )
        return result


def call_boundaries(node: torch.fx.Node) -> list[CallBoundary]:
    """Where the value of a node stands in calls."""
    return list(node.meta.get(_MARKS, ()))


def _key(text: str) -> CallKey:
    path, number = split_call_path(text)
    return path.removeprefix(_ROOT).removeprefix("."), number


def _mark(tracer: Any, leaves: list[Any], number: int, kind: str) -> None:
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            slot = proxy_tensor.get_proxy_slot(leaf, tracer, None)
            if slot is not None:
                slot.proxy.node.meta.setdefault(_MARKS, []).append((number, kind, place))
