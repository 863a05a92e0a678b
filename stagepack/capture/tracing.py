"""Trace a module by ``torch.export`` as it is meant, and record the trace."""

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from stagepack.capture.asked_properties import AskedProperties
from stagepack.capture.captured_records import with_records
from stagepack.capture.dynamic_dims import declared_dims, is_range_violation, narrowed_dynamic_shapes
from stagepack.capture.imports import register_model_outputs
from stagepack.capture.inputs import Inputs
from stagepack.capture.recurrent_layers import sequences_of_any_length
from stagepack.capture.size_sequences import sequence_of_any_length
from stagepack.capture.torch_messages import suppress_stderr
from stagepack.capture.traced_calls import TracedCalls
from stagepack.capture.traced_modes import TracedModes
from stagepack.torch_internals import FakeTensor, assert_in_trace, composites_of_libraries_decomposed, example_size

# Whether this torch is 2.11, see `export_module`.
_PROVES_FEW_GUARDS: Final = str(torch.__version__).startswith("2.11.")
_READ_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_CHUNK: Final = (torch.chunk, torch.Tensor.chunk)
_MAX_POOL: Final = (torch.max_pool1d, torch.nn.functional.max_pool1d)
# Functions whose results are row-major, in whatever memory their tensors are.
_ROW_MAJOR: Final = frozenset({"contiguous", "embedding", "layer_norm", "linear", "one_hot"})
# How many of its arguments decide the layout of a result, where not all do: not the mask.
_DECIDING: Final = {"scaled_dot_product_attention": 3}


@contextlib.contextmanager
def explicit_signature(model: torch.nn.Module, inputs: Inputs) -> Iterator[None]:
    """Give a model, within the ``with`` block, a ``forward`` that names all inputs; one that names them already is left as it is."""
    forward = model.forward
    signature = inspect.signature(forward)
    named = _named_parameters(signature, inputs)
    if named is None:
        yield
        return

    @functools.wraps(forward)
    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call_forward.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    is_own = "forward" in vars(model)
    model.forward = call_forward
    try:
        yield
    finally:
        del model.forward
        if is_own:
            model.forward = forward


def _named_parameters(signature: inspect.Signature, inputs: Inputs) -> list[inspect.Parameter] | None:
    """The parameters with a name for each input that ``**kwargs`` takes; None if it takes none."""
    further_names = [name for name in inputs.kwargs if name not in signature.parameters]
    parameters = list(signature.parameters.values())
    if not further_names or not parameters or parameters[-1].kind != inspect.Parameter.VAR_KEYWORD:
        return None
    return [*parameters[:-1], *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in further_names)]


@contextlib.contextmanager
def recorded_trace(model: torch.nn.Module, packages: Collection[str]) -> Iterator[dict[str, Any]]:
    """Trace a model as it is meant, within the ``with`` block; what is recorded of it are fields of its `Capture`.

    Recurrent layers take sequences of any length; ``tensor.data`` is ``tensor.detach()``; ``tensor.chunk`` cuts any size into equal
    parts; ``max_pool1d``, ``linspace`` and window functions take any length; ``einsum`` contracts in the order that ``opt_einsum`` finds
    for the sizes of the example; ``tensor.contiguous()`` of an input is in the program though it does nothing in the example; in the
    packages of the model, ``len(tensor)`` is a size that may change.
    """
    register_model_outputs()
    calls, modes, asked = TracedCalls(), TracedModes(), AskedProperties()
    fields: dict[str, Any] = {}
    with (
        suppress_stderr(),
        calls.recorded(),
        modes.recorded(),
        model.register_forward_hook(lambda _module, _args, result: with_records(result)),
        sequences_of_any_length(),
        _contraction_of_example(),
        _TracedFunctions(model, asked),
        _length_in_packages(packages),
        composites_of_libraries_decomposed(),
    ):
        yield fields
    fields.update(calls=calls, functions=modes.functions, questions=asked.questions)


def export_module(model: torch.nn.Module, inputs: Inputs, dynamic_shapes: Any) -> ExportedProgram:
    """Export a module, with narrower ranges of sizes where its code demands it.

    torch 2.11 cannot prove such guards as ``min(8*s, 16*s) == 8*s``, which grouped-query attention with a dynamic sequence needs, and
    refuses the range of `s`: it gets assertions in the program. Later versions prove them.
    """
    export = functools.partial(torch.export.export, model, tuple(inputs.args), dict(inputs.kwargs))
    try:
        return export(dynamic_shapes=dynamic_shapes)
    except RuntimeError as error:
        violation = error
    if is_range_violation(violation):
        try:
            return _export_in_ranges(export, model, dynamic_shapes)
        except RuntimeError as error:
            violation = error
    if _PROVES_FEW_GUARDS:
        return export(dynamic_shapes=dynamic_shapes, prefer_deferred_runtime_asserts_over_guards=True)
    raise violation


def _export_in_ranges(
    export: Callable[..., ExportedProgram], model: torch.nn.Module, dynamic_shapes: Any
) -> ExportedProgram:
    """Export a module that does not allow the ranges of its sizes; those that torch suggests are used."""
    with _comparing_equal_sizes(model, dynamic_shapes):
        try:
            return export(dynamic_shapes=dynamic_shapes)
        except RuntimeError as error:
            narrowed = narrowed_dynamic_shapes(error, dynamic_shapes)
            if narrowed is None:
                raise
        return export(dynamic_shapes=narrowed)


def _comparing_equal_sizes(model: torch.nn.Module, dynamic_shapes: Any) -> RemovableHandle:
    """Compare, at each call of a model within a ``with`` block, the sizes of its inputs that share a ``Dim``."""

    def compare(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first_sizes: dict[str, Any] = {}
        inputs = Inputs(args=args, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
        for leaf, dims in declared_dims(module.forward, inputs):
            for axis, dim in dims.items():
                if axis is not None and isinstance(dim, Dim) and not hasattr(dim, "root"):
                    size = leaf.shape[axis]
                    assert_in_trace(first_sizes.setdefault(dim.__name__, size) == size)

    return model.register_forward_pre_hook(compare, with_kwargs=True)


@contextlib.contextmanager
def _contraction_of_example() -> Iterator[None]:
    """Let ``opt_einsum``, by which torch orders contractions where it is installed, compare the sizes of the example: it would fix them."""
    opt_einsum = torch.backends.opt_einsum.get_opt_einsum()
    if opt_einsum is None:
        yield
        return
    contract_path = opt_einsum.contract_path

    def path_of_example(equation: str, *operands: Any, **options: Any) -> Any:
        if not any(type(operand) is FakeTensor for operand in operands):
            return contract_path(equation, *operands, **options)
        shapes = [tuple(map(_size_in_example, operand.shape)) for operand in operands]
        return contract_path(equation, *shapes, shapes=True, **options)

    with mock.patch.object(opt_einsum, "contract_path", path_of_example):
        yield


def _size_in_example(size: "int | torch.SymInt") -> int:
    return size if isinstance(size, int) else example_size(size) or int(size)


@contextlib.contextmanager
def _length_in_packages(packages: Collection[str]) -> Iterator[None]:
    """Define ``len`` in the modules of some packages.

    It is not replaced for all code: the compiler of torch knows the builtin function by its identity.
    """
    # A module may have several names.
    namespaces = {
        id(module): _globals(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and "len" not in _globals(module)
    }
    for namespace in namespaces.values():
        namespace["len"] = _length
    try:
        yield
    finally:
        for namespace in namespaces.values():
            namespace.pop("len", None)


def _globals(module: Any) -> dict[str, Any]:
    """The names of a module, of whatever class it is."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


def _length(value: Any, /) -> Any:
    """``len``, which is a number of Python for all but tensors of a trace: a number would fix the size."""
    return value.shape[0] if type(value) is FakeTensor and value.ndim else builtins.len(value)


class _TracedFunctions(TorchFunctionMode):
    """Calls other functions of torch in the place of some, for fake tensors."""

    def __init__(self, model: torch.nn.Module, asked: AskedProperties) -> None:
        super().__init__()
        self._model = model
        self._asked = asked
        # Whether a tensor has one layout in all calls, whatever layout the inputs have. No attribute: constants are the caller's.
        self._known_layouts = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._asked.record(func, args)
        result = self._called(func, args, kwargs or {})
        if type(result) is FakeTensor:
            self._known_layouts[result] = self._makes_known_layout(getattr(func, "__name__", ""), args, kwargs or {})
        return result

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        first = args[0] if args else None
        if type(first) is FakeTensor:
            if func == _READ_DATA:
                # What is read from `data` has no origin in the trace.
                return first.detach()
            if func in _MAX_POOL and not isinstance(first.shape[-1], int):
                # torch reads the length of the sequence as a number for `max_pool1d` alone. Values and ties are the same.
                return torch.max_pool1d_with_indices(*_without_indices(*args, **kwargs))[0]
            if func in _CHUNK and (parts := _equal_chunks(*args, **kwargs)) is not None:
                return parts
        elif (sequence := sequence_of_any_length(func, args, kwargs)) is not None:
            return sequence
        result = func(*args, **kwargs)
        if func == torch.Tensor.contiguous and result is first and not self._has_known_layout(first):
            # torch calls no operator, which inputs in another layout need. A view, since a trace knows one node for each tensor.
            return torch.ops.aten.contiguous.default(torch.ops.aten.alias.default(first), *args[1:], **kwargs)
        return result

    def _makes_known_layout(self, function_name: str, args: Any, kwargs: Any) -> bool:
        if function_name in _ROW_MAJOR:
            return not kwargs.get("memory_format")
        deciding = args[: _DECIDING[function_name]] if function_name in _DECIDING else (args, kwargs)
        return all(map(self._has_known_layout, _tensors(deciding)))

    def _has_known_layout(self, tensor: torch.Tensor) -> bool:
        if tensor not in self._known_layouts:
            # In a trace, the buffers of the model are others than before.
            is_weight = isinstance(tensor, torch.nn.Parameter) or any(tensor is one for one in self._model.buffers())
            self._known_layouts[tensor] = is_weight
        is_known: bool = self._known_layouts[tensor]
        return is_known


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _without_indices(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...]:
    """The arguments of ``max_pool1d_with_indices``. The parameters are those of ``max_pool1d``."""
    return input, kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode


def _equal_chunks(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...] | None:
    """The chunks of a dimension that is a multiple of their number; None for others.

    torch counts chunks by a division that it cannot prove, so that it fixes the dimension.
    """
    size = input.shape[dim]
    if isinstance(size, int) or not isinstance(chunks, int) or not statically_known_true(size % chunks == 0):
        return None
    return torch.split(input, [size // chunks] * chunks, dim)
