"""What the code of a model asks of its inputs besides values, sizes and dtypes.

torch fixes the answer to ``x.is_contiguous()`` or ``x.requires_grad`` to the answer for the example, without a condition. The trace
therefore sees the functions that ask, and a model that calls one is tried with inputs for which the answers differ.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, Literal

import torch

from stagepack.capture.inputs import Inputs
from stagepack.capture.torch_messages import STAGEPACK_FOLDER, frame_location
from stagepack.torch_internals import tree_leaves, tree_map_tensors

Property = Literal["memory layout", "gradients"]

# By the names of functions, methods, attributes and operators of torch.
_PROPERTY_OF_NAME: Final[dict[str, Property]] = {
    "_base": "memory layout",
    "_debug_has_internal_overlap": "memory layout",
    "_is_view": "memory layout",
    "dim_order": "memory layout",
    "is_conj": "memory layout",
    "is_contiguous": "memory layout",
    "is_neg": "memory layout",
    "is_non_overlapping_and_dense": "memory layout",
    "storage": "memory layout",
    "storage_offset": "memory layout",
    "stride": "memory layout",
    "sym_storage_offset": "memory layout",
    "sym_stride": "memory layout",
    "untyped_storage": "memory layout",
    "_version": "gradients",
    "grad": "gradients",
    "grad_fn": "gradients",
    "is_inference": "gradients",
    "is_leaf": "gradients",
    "output_nr": "gradients",
    "requires_grad": "gradients",
    "retains_grad": "gradients",
}
_TORCH_FOLDER: Final = os.path.dirname(torch.__file__) + os.path.sep
# What a model calls to ask, but for modes and overrides. The rest of torch asks for itself.
_ASKING_FILES: Final = (
    __file__,
    *(_TORCH_FOLDER + file_name for file_name in ("overrides.py", "_ops.py", "_tensor.py", "_prims_common")),
)
# How many tensors are changed alone, where an example has several.
_MAX_CHANGED_ALONE: Final = 8


@dataclass(frozen=True, slots=True)
class Question:
    """The first call of a model that asks for a property."""

    function: str
    # The line that calls it, see `stagepack.capture.torch_messages`; empty if it is not known.
    location: str


class AskedProperties:
    """The properties that a model asks its tensors for while it is traced."""

    def __init__(self) -> None:
        self.questions: dict[Property, Question] = {}

    def record(self, function: Any, args: tuple[Any, ...]) -> None:
        """Record a call of a function of torch if it asks for a property of a tensor that is no parameter."""
        function_name = getattr(function, "__name__", "")
        function_name = function.__self__.__name__ if function_name == "__get__" else function_name.partition(".")[0]
        property_name = _PROPERTY_OF_NAME.get(function_name)
        if (
            property_name is None
            or property_name in self.questions
            or not args
            or isinstance(args[0], torch.nn.Parameter)
        ):
            return
        frame = inspect.currentframe()
        while frame is not None and _is_between(frame.f_code):
            frame = frame.f_back
        asking_file = "" if frame is None else frame.f_code.co_filename
        if not asking_file.startswith((_TORCH_FOLDER, STAGEPACK_FOLDER)):
            self.questions[property_name] = Question(function_name, frame_location(frame))


def _is_between(code: CodeType) -> bool:
    return code.co_name == "__torch_function__" or code.co_filename.startswith(_ASKING_FILES)


@dataclass(frozen=True, slots=True)
class OtherInputs:
    """How tensors get another property than the tensors of the example have."""

    # Where or what the tensors are then, such as ``in column-major memory``.
    description: str
    # Returns a tensor that is so, with the same elements; or the tensor itself if no other is.
    change: Callable[[torch.Tensor], torch.Tensor]
    # Returns the context in which the model is called.
    context: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
    # The number of the only tensor that changes; None for all.
    position: int | None = None

    def of(self, inputs: Inputs) -> Inputs:
        """Return inputs with changed tensors."""
        tensor_numbers = itertools.count()

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            is_kept = next(tensor_numbers) != self.position is not None
            return tensor if is_kept or tensor.layout != torch.strided else self.change(tensor)

        args, kwargs = tree_map_tensors(changed, (tuple(inputs.args), dict(inputs.kwargs)))
        return dataclasses.replace(inputs, args=args, kwargs=kwargs)

    def caller(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a module that calls a model with changed tensors."""
        return _Caller(model, self)


class _Caller(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, changed_inputs: OtherInputs) -> None:
        super().__init__()
        self.model = model
        self._changed_inputs = changed_inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._changed_inputs.context():
            inputs = self._changed_inputs.of(Inputs(args=args, kwargs=kwargs))
            return self.model(*inputs.args, **inputs.kwargs)


def other_inputs(inputs: Inputs, properties: Collection[Property]) -> Iterator[tuple[Property, OtherInputs]]:
    """Yield how the tensors of an example get other properties: all of them together, and each alone."""
    leaves = tree_leaves((tuple(inputs.args), dict(inputs.kwargs)))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    alone = range(min(len(tensors), _MAX_CHANGED_ALONE)) if len(tensors) > 1 else ()
    for property_name in properties:
        for other_inputs_of_all in _OTHERS[property_name]:
            for position in (None, *alone):
                tried = dataclasses.replace(other_inputs_of_all, position=position)
                with tried.context():
                    changed = tree_leaves(tried.of(Inputs(args=tuple(tensors))).args)
                if any(tensor is not original for tensor, original in zip(changed, tensors, strict=True)):
                    yield property_name, tried


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().resolve_conj().resolve_neg()


def _with_offset(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _with_steps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape, 2))[..., 1].copy_(tensor)


def _permuted(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The tensor in memory whose order of dimensions is a permutation that is its own inverse."""
    return tensor.new_empty([tensor.shape[dim] for dim in dims]).permute(dims).copy_(tensor)


def _column_major(tensor: torch.Tensor) -> torch.Tensor:
    return _permuted(tensor, list(range(tensor.ndim))[::-1]) if tensor.ndim > 1 else tensor


def _last_swapped(tensor: torch.Tensor) -> torch.Tensor:
    dims = list(range(tensor.ndim))
    return _permuted(tensor, [*dims[:-2], dims[-1], dims[-2]]) if tensor.ndim > 2 else tensor


def _first_swapped(tensor: torch.Tensor) -> torch.Tensor:
    return _permuted(tensor, [1, 0, *range(2, tensor.ndim)]) if tensor.ndim > 2 else tensor


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.clone(memory_format=formats[tensor.ndim]) if tensor.ndim in formats else tensor


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].clone().expand(tensor.shape) if tensor.ndim and tensor.shape[0] > 1 else tensor


def _lazily_conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor


def _lazily_negated(tensor: torch.Tensor) -> torch.Tensor:
    is_part = tensor.dtype in (torch.float32, torch.float64)  # of complex numbers
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag if is_part else tensor


def _has_gradients(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _with_gradients(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if _has_gradients(tensor) else tensor


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    return _with_gradients(tensor).clone().mul_(1)


_OTHERS: Final[dict[Property, tuple[OtherInputs, ...]]] = {
    "memory layout": (
        OtherInputs("in row-major memory", _row_major),
        OtherInputs("in column-major memory", _column_major),
        OtherInputs("with the last two dimensions exchanged in memory", _last_swapped),
        OtherInputs("with the first two dimensions exchanged in memory", _first_swapped),
        OtherInputs("in channels-last memory", _channels_last),
        OtherInputs("with an offset in their storage", _with_offset),
        OtherInputs("with steps in their storage", _with_steps),
        OtherInputs("expanded from their first row", _expanded),
        OtherInputs("conjugated lazily", _lazily_conjugated),
        OtherInputs("negated lazily", _lazily_negated),
    ),
    "gradients": (
        OtherInputs("that require gradients", _with_gradients, torch.enable_grad),
        OtherInputs("that are computed from others with gradients", _computed, torch.enable_grad),
        OtherInputs("of torch.inference_mode()", torch.clone, torch.inference_mode),
    ),
}
