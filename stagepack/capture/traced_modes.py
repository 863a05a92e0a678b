"""Grad modes, and functions with a ``backward`` of their own, which the traces of ``torch.export`` drop."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from stagepack.torch_internals import (
    EXPORT_ROOT,
    changed_grad_mode,
    traced_nodes,
)

_GRAD_MODE_KEY = "stagepack_grad_mode"  # of a node's `meta`


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFunction:
    """A ``torch.autograd.Function`` that a model calls, and its module."""

    class_name: str
    module_path: str


class TracedModes:
    """Grad modes and functions with a backward of their own in a trace."""

    def __init__(self) -> None:
        self._module_of_function: dict[str, str] = {}
        self._first_mode: dict[int, bool] = {}
        self._mode = True  # outside of functions

    @property
    def functions(self) -> tuple[CustomFunction, ...]:
        """The functions whose results may need gradients, each once."""
        return tuple(
            CustomFunction(class_name=class_name, module_path=module_path)
            for class_name, module_path in self._module_of_function.items()
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record in all traces of torch within the ``with`` block."""
        with traced_nodes(self._record):
            yield

    def _record(self, tracer: Any, node: FxNode) -> None:
        if node.op == "placeholder":
            self._mode = self._first_mode[id(tracer)] = torch.is_grad_enabled()
        calls = [] if torch.is_grad_enabled() else list(_function_calls())
        if not calls:
            new_mode = changed_grad_mode(node)
            self._mode = torch.is_grad_enabled() if new_mode is None else new_mode
        # A function runs its forward without gradients: its nodes have the mode around it.
        node.meta[_GRAD_MODE_KEY] = (self._mode, self._first_mode.get(id(tracer), self._mode))
        for function_class, args in calls:
            # Activation checkpointing has a function of torch.
            is_own = function_class.__module__.partition(".")[0] != "torch"
            if is_own and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
                paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
                module_path = (paths or [""])[-1].removeprefix(EXPORT_ROOT).lstrip(".")
                self._module_of_function.setdefault(function_class.__qualname__, module_path)


def _function_calls() -> Iterator[tuple[type, tuple[Any, ...]]]:
    """The functions that run, and their arguments. They are in the stack, however the model came by their ``apply``."""
    code = torch.autograd.Function.apply.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["cls"], frame.f_locals["args"]
        frame = frame.f_back


def lost_grad_mode(node: FxNode, captured_mode: bool | None) -> bool | None:
    """The grad mode that a node ran in, or None if the program runs it in that, which is `captured_mode`, or for None the caller's."""
    mode, first_mode = node.meta.get(_GRAD_MODE_KEY, (None, None))
    expected_mode = first_mode if captured_mode is None else captured_mode
    return None if mode == expected_mode else mode
