"""Tensors without data that know how their data is computed from a checkpoint.

A model is loaded with them as with any others: what its loading code does with them, such as a change of dtype or the stacking of the
experts of a layer, is recorded, and done with real data when one tensor is written. So no more than one tensor is in memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from stagepack.capture.checkpoint import CheckpointTensor
from stagepack.format.file_writing import FileRange
from stagepack.torch_internals import (
    DataDependentError,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    operator_schema,
    tree_leaves,
    tree_map_tensors,
)

# Computes a tensor: takes a function that returns the data of a deferred tensor, and any other tensor as it is.
_Computation = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]


# Operators whose result has the bytes of their first argument.
_IDENTITIES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class DataNeededError(Exception):
    """What the code of a model does with a deferred tensor cannot be recorded: its weights must be in memory."""


class DeferredTensors(TorchDispatchMode):
    """Deferred tensors. What happens to them in a ``with`` statement over this object is recorded.

    A deferred tensor is a fake tensor of torch on the CPU. A function that needs its data, such as ``torch.equal``, gets it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = FakeTensorMode()
        # By the identity of the fake tensor, which is held so that no other object gets this identity.
        self._computations: dict[int, tuple[torch.Tensor, _Computation]] = {}
        self._locations: dict[int, FileRange] = {}

    def add(self, tensor: CheckpointTensor) -> torch.Tensor:
        """Return a deferred tensor that has the data of a tensor of a checkpoint."""
        with self._fake_mode:
            fake_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._computations[id(fake_tensor)] = (fake_tensor, lambda _: tensor.read())
        self._set_location(fake_tensor, tensor.location)
        return fake_tensor

    def replace(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return a parameter without data in the place of one with data; it has no data until `assign`."""
        # Not by `from_tensor` of the mode, which keeps the memory of the other one.
        with self._fake_mode:
            fake_tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        return torch.nn.Parameter(fake_tensor, requires_grad=parameter.requires_grad)

    def assign(self, fake_tensor: torch.Tensor, tensor: CheckpointTensor) -> None:
        """Give the data of a tensor of a checkpoint to a tensor that `replace` returned; its dtype is converted."""
        dtype, strides = fake_tensor.dtype, fake_tensor.stride()

        def compute(_: object) -> torch.Tensor:
            stored = tensor.read().to(dtype)
            # As `copy_` of a state dict does, which keeps the order of the dimensions in memory.
            if stored.stride() == strides:
                return stored
            return torch.empty_strided(stored.shape, strides, dtype=dtype).copy_(stored)

        self._computations[id(fake_tensor)] = (fake_tensor, compute)
        if dtype == tensor.dtype and fake_tensor.is_contiguous():
            self._set_location(fake_tensor, tensor.location)

    def location(self, tensor: torch.Tensor) -> FileRange | None:
        """Return the bytes of a file that a deferred tensor consists of; None if they must be computed, or it is not deferred."""
        return self._locations.get(id(tensor))

    def _set_location(self, tensor: torch.Tensor, location: FileRange | None) -> None:
        if location is not None:
            self._locations[id(tensor)] = location

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor is deferred."""
        return id(tensor) in self._computations

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a deferred tensor, and any other tensor as it is. The data may be mapped for reading only."""
        known: dict[int, torch.Tensor] = {}

        def compute(wanted: torch.Tensor) -> torch.Tensor:
            if id(wanted) not in self._computations:
                if isinstance(wanted, FakeTensor):
                    raise DataNeededError("a tensor has no data in the checkpoint")
                return wanted
            if id(wanted) not in known:
                known[id(wanted)] = self._computations[id(wanted)][1](compute)
            return known[id(wanted)]

        with torch.no_grad():
            return compute(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator, and record it if it has deferred tensors among its arguments."""
        kwargs = kwargs or {}
        if not any(leaf in self for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)):
            return func(*args, **kwargs)
        if operator_schema(func).is_mutable:
            raise DataNeededError(f"{func} writes to a weight")

        def compute(real: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            real_args, real_kwargs = tree_map_tensors(real, (args, dict(kwargs)))
            return func(*real_args, **real_kwargs)

        try:
            result = func(*args, **kwargs)
        except DataDependentError:
            return compute(self.real)
        if isinstance(result, torch.Tensor):
            self._computations.setdefault(id(result), (result, compute))
            if func in _IDENTITIES:
                self._set_location(result, self.location(args[0]))
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._computations.setdefault(id(item), (item, partial(_item, compute, index)))
        return result


def _item(compute: _Computation, index: int, real: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """One of several results of a computation."""
    return compute(real)[index]
