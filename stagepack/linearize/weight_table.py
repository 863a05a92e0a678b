"""The tensors of a captured program -> the weight table of a graph, and the tensors to store.

Tensors that share storage stay shared: equal views (tied weights) become one weight with several names; different views become one
stored tensor, the base, and weights that are views of it.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch

from stagepack.errors import UnsupportedError
from stagepack.format.codec import is_plain
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Weight
from stagepack.format.validate import is_tensor_name
from stagepack.format.weights import TensorSpec
from stagepack.linearize.shared_storage import BaseTensor, base_tensors
from stagepack.linearize.tensor_memory import dtype_name, is_all_zeros, offset_in_base, storage_key
from stagepack.torch_internals import FakeTensor

WeightKind = Literal["parameter", "buffer", "non_persistent_buffer", "constant"]


class StoredTensorSource(NamedTuple):
    """A tensor to write into a weight file, and the function that returns it contiguous."""

    spec: TensorSpec
    contiguous: Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The weights of a model.

    Attributes:
        weights: the entries, in the order of the model.
        values: the name of the value that stands for a weight, by each of its fully qualified names.
        stored: the tensors to write, by stored name.
        tensors: the tensors of the model by fully qualified name; they are not copied.
    """

    weights: tuple[Weight, ...]
    values: Mapping[str, str]
    stored: Mapping[str, StoredTensorSource]
    tensors: Mapping[str, torch.Tensor]

    def of_values(self, value_names: Collection[str]) -> "WeightTable":
        """Return the part of the table that some values need."""
        needed = {
            weight_name
            for weight in self.weights
            if weight.value in value_names
            for weight_name in (*weight.names, *([] if weight.base is None else [weight.base]))
        }
        weights = tuple(weight for weight in self.weights if weight.names[0] in needed)
        names = {weight_name for weight in weights for weight_name in weight.names}
        return WeightTable(
            weights=weights,
            values={name: value_name for name, value_name in self.values.items() if name in names},
            stored={name: source for name, source in self.stored.items() if name in names},
            tensors={name: tensor for name, tensor in self.tensors.items() if name in names},
        )

    def with_constant_prefix(self, prefix: str) -> "WeightTable":
        """Return the table with a text before the name of each constant."""
        constants = {name for weight in self.weights if weight.kind == "constant" for name in weight.names}

        def renamed(name: str) -> str:
            return prefix + name if name in constants else name

        weights = [
            msgspec.structs.replace(
                weight,
                names=tuple(map(renamed, weight.names)),
                base=None if weight.base is None else renamed(weight.base),
            )
            for weight in self.weights
        ]
        return WeightTable(
            weights=tuple(weights),
            values={renamed(name): value_name for name, value_name in self.values.items()},
            stored={
                renamed(name): StoredTensorSource(
                    msgspec.structs.replace(source.spec, name=renamed(name)), source.contiguous
                )
                for name, source in self.stored.items()
            },
            tensors={renamed(name): tensor for name, tensor in self.tensors.items()},
        )


def weight_table(
    tensors: Mapping[str, tuple[WeightKind, torch.Tensor]],
    *,
    store_zeros: bool = False,
    data_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> WeightTable:
    """Describe the tensors of a model.

    store_zeros: store persistent buffers of all zeros, too. Without it, as for other buffers and constants, their entry says that they are
        zeros, and no file has bytes of them.
    """
    for tensor_name, (_, tensor) in tensors.items():
        _require_storable(tensor_name, tensor)
    tensor_of = {tensor_name: tensor for tensor_name, (_, tensor) in tensors.items()}
    tied_names = _tied_names(tensors)
    bases = base_tensors({weight_names[0]: tensor_of[weight_names[0]] for weight_names in tied_names}, tensor_of)
    always_stored = ("parameter", "buffer") if store_zeros else ("parameter",)
    weights = []
    values: dict[str, str] = {}
    stored: dict[str, StoredTensorSource] = {}
    for weight_index, weight_names in enumerate(tied_names):
        kind, tensor = tensors[weight_names[0]]
        base = bases[weight_names[0]]
        zeros = base is None and kind not in always_stored and is_all_zeros(data_of(tensor))
        weight = _weight(f"w{weight_index}", weight_names, kind, tensor, base, zeros=zeros)
        weights.append(weight)
        values.update(dict.fromkeys(weight_names, weight.value))
        source = tensor if base is None else base.tensor
        spec = TensorSpec(name=weight.stored, dtype=dtype_name(source.dtype), shape=tuple(source.shape))
        contiguous = partial(_contiguous, source, tensor if base is None else base.member, data_of)
        stored.setdefault(weight.stored, StoredTensorSource(spec, contiguous))
    return WeightTable(weights=tuple(weights), values=values, stored=stored, tensors=tensor_of)


def _contiguous(
    source: torch.Tensor, member: torch.Tensor, data_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The elements of a tensor, which may be a view of all that is in the storage of a `member` of the model."""
    data = data_of(member).detach()
    if source is not member:
        data = torch.empty(0, dtype=source.dtype, device=data.device).set_(
            data.untyped_storage(), source.storage_offset(), source.shape, source.stride()
        )
    return data.contiguous()


def _tied_names(tensors: Mapping[str, tuple[WeightKind, torch.Tensor]]) -> list[list[str]]:
    """The names of the model, those of equal views of one storage together."""
    tied: dict[tuple[object, ...], list[str]] = {}
    for tensor_name, (kind, tensor) in tensors.items():
        view_key = (
            *storage_key(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            kind,
            tensor.requires_grad,
        )
        # Tensors without elements share nothing.
        tied.setdefault(view_key if tensor.numel() else (tensor_name,), []).append(tensor_name)
    return list(tied.values())


def _weight(
    value_name: str,
    weight_names: Iterable[str],
    kind: WeightKind,
    tensor: torch.Tensor,
    base: BaseTensor | None,
    *,
    zeros: bool,
) -> Weight:
    weight_names = tuple(weight_names)
    is_view = base is not None and base.name != weight_names[0]
    return Weight(
        value=value_name,
        names=weight_names,
        kind=kind,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        trainable=tensor.requires_grad and tensor.is_leaf,
        strides=tuple(tensor.stride()) if is_view or not tensor.is_contiguous() else None,
        base=base.name if base is not None and is_view else None,
        offset=offset_in_base(tensor, base.tensor) if base is not None and is_view else 0,
        zeros=zeros,
    )


def _require_storable(tensor_name: str, tensor: torch.Tensor) -> None:
    if not is_tensor_name(tensor_name) or not is_plain(tensor_name):
        raise UnsupportedError(
            f"the tensor {tensor_name[:80]!r} cannot be stored under this name: rename it in the model"
        )
    if reason := _not_plain(tensor):
        raise UnsupportedError(
            f"the tensor {tensor_name!r} cannot be stored: {reason}: make it a plain strided tensor before the export"
        )
    if dtype_name(tensor.dtype) not in ITEM_SIZE:
        raise UnsupportedError(f"the tensor {tensor_name!r} cannot be stored: dtype {tensor.dtype}")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"the tensor {tensor_name!r} has no data: it is on the meta device")
    if math.prod(tensor.shape) and tensor.untyped_storage().size() == 0:
        raise UnsupportedError(f"the tensor {tensor_name!r} has no data: its storage is empty")


def _not_plain(tensor: torch.Tensor) -> str | None:
    """Why a tensor is more than strided elements in memory, or None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return f"class {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    return "lazy conjugate or negative bit" if tensor.is_conj() or tensor.is_neg() else None
