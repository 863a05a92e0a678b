"""What the traces of ``torch.export`` drop, recorded while it traces a model.

- A change of the grad mode inside ``torch.autocast``, and the ``backward`` of a ``torch.autograd.Function``.
- The arguments and the result of each call of a module, by a mark on the nodes of the trace: torch's ``preserve_module_call_signature``
  fails on a module that is called twice in different ways.
- Results of the user's own dataclasses, which torch refuses unless they are registered, which lasts as long as the process and can be done
  once, by the user: a result has a `CapturedRecord` in the place of each.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node as FxNode

from stagepack.format.rules import split_call_path
from stagepack.format.tree import Record, type_name
from stagepack.torch_internals import (
    EXPORT_ROOT,
    TreeSpec,
    changed_grad_mode,
    is_registered,
    register_container,
    traced_module_calls,
    traced_node,
    traced_nodes,
    tree_flatten,
    tree_map,
)

_GRAD_MODE_KEY = "stagepack_grad_mode"  # of a node's `meta`
# A call of a module: the path of the module, and the text behind ``@`` of a call that is not its first.
CallKey = tuple[str, str]
# Where a value crosses the boundary of a module call: the number of the call, the direction, and the number of the leaf.
CallBoundary = tuple[int, Literal["argument", "result"], int]
_BOUNDARIES_KEY = "stagepack_calls"  # of a node's `meta`


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
            is_own = function_class.__module__.partition(".")[0] != "torch"  # unlike that of activation checkpointing
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


class CapturedRecord(Record):
    """The fields of an object of a dataclass, with the name of the class."""

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.__class_name = class_name

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedRecord, (self.__class_name, dict.copy(self))

    def flatten(self) -> tuple[list[Any], tuple[str, tuple[str, ...]]]:
        """Return the fields, and what remains: the name of the class, and those of the fields."""
        return list(dict.values(self)), (self.__class_name, tuple(self))


register_container(
    CapturedRecord,
    CapturedRecord.flatten,
    lambda fields, context: CapturedRecord(context[0], dict(zip(context[1], fields, strict=True))),
)


@contextlib.contextmanager
def captured_results(model: torch.nn.Module) -> Iterator[None]:
    """Let a model return records in the place of unregistered dataclasses, within the ``with`` block."""
    hook = model.register_forward_hook(lambda _module, _args, result: with_records(result))
    try:
        yield
    finally:
        hook.remove()


def with_records(result: Any) -> Any:
    """Return a result with a record in the place of each object of an unregistered dataclass."""
    return tree_map(lambda leaf: _record(leaf) if _is_unregistered(leaf) else leaf, result)


def _is_unregistered(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not is_registered(type(leaf))


def _record(leaf: Any) -> CapturedRecord:
    fields = {field.name: with_records(getattr(leaf, field.name)) for field in dataclasses.fields(leaf)}
    if isinstance(leaf, Mapping):  # such as a ModelOutput, whose fields that are None are no items
        fields = {field_name: field for field_name, field in fields.items() if field is not None}
    return CapturedRecord(type_name(type(leaf)), fields)
