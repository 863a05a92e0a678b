"""Functions that ``torch.export`` traces wrongly, traced as they are meant."""

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from stagepack.capture.asked_properties import AskedProperties
from stagepack.capture.model_runs import model_packages
from stagepack.capture.recurrent_layers import sequences_of_any_length
from stagepack.capture.size_sequences import sequence_of_any_length
from stagepack.torch_internals import (
    FakeTensor,
    example_size,
)

_READ_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_CHUNK: Final = (torch.chunk, torch.Tensor.chunk)
_MAX_POOL: Final = (torch.max_pool1d, torch.nn.functional.max_pool1d)
# Functions whose results are row-major, in whatever memory their tensors are.
_ROW_MAJOR: Final = frozenset({"contiguous", "embedding", "layer_norm", "linear", "one_hot"})
# How many of its arguments decide the layout of a result, where not all do: not the mask.
_DECIDING: Final = {"scaled_dot_product_attention": 3}


@contextlib.contextmanager
def traced_as_meant(model: torch.nn.Module) -> Iterator[AskedProperties]:
    """Trace what `torch.export` would stop at, or fix to the sizes of the example, within the ``with`` block.

    Recurrent layers take sequences of any length; ``tensor.data`` is ``tensor.detach()``; ``tensor.chunk`` cuts any size into equal
    parts; ``max_pool1d``, ``linspace`` and window functions take any length; ``einsum`` contracts in the order that ``opt_einsum`` finds
    for the sizes of the example; ``tensor.contiguous()`` of an input is in the program though it does nothing in the example; in the
    packages of the model, ``len(tensor)`` is a size that may change.
    """
    asked = AskedProperties()
    with (
        sequences_of_any_length(),
        _contraction_of_example(),
        _TracedFunctions(model, asked),
        _length_in_packages(model),
    ):
        yield asked


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
def _length_in_packages(model: torch.nn.Module) -> Iterator[None]:
    """Define ``len`` in the modules of the packages that the classes of a model are from, but not in torch.

    It is not replaced for all code: the compiler of torch knows the builtin function by its identity.
    """
    packages = model_packages(model)
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
