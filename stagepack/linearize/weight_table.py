"""The tensors of a captured program -> the weight table of a graph, and the tensors to store.

Tensors that share storage stay shared: equal views (tied weights) become one weight with several names; different views become one
stored tensor, the base, and weights that are views of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from stagepack.capture.checkpoint import DeferredTensors, map_tensor
from stagepack.errors import UnsupportedError
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Weight
from stagepack.format.limits import is_plain
from stagepack.format.rules import is_tensor_name
from stagepack.format.shapes import is_dense, row_major_strides
from stagepack.format.weights import StoredTensor, TensorSpec
from stagepack.linearize.program_tensors import WeightKind, dtype_name
from stagepack.torch_internals import FakeTensor, storage_identity, weight_tensors

# The file and the position of each stored tensor, by stored name.
TensorLocations = Mapping[str, tuple[Path, StoredTensor]]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy if it is on the CPU."""
    # A dimension of size 1 may have any stride, which a view as bytes refuses: describe the elements as one dimension.
    elements = tensor.detach().cpu().as_strided((tensor.numel(),), (1,))
    return elements.view(torch.uint8).numpy().data


def is_all_zeros(tensor: torch.Tensor) -> bool:
    """Return whether every bit of a dense tensor is zero; the sign bit of -0.0 is not."""
    elements = tensor.detach().as_strided((tensor.numel(),), (1,))
    return not bool(elements.view(torch.uint8).any())


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for tensors that have elements and share storage."""
    # The storage of a fake tensor has no address.
    is_fake = isinstance(tensor, FakeTensor)
    return (tensor.device, is_fake, storage_identity(tensor) if is_fake else tensor.untyped_storage().data_ptr())


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor reaches, with the end excluded."""
    last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last_element + 1) * tensor.element_size()


def offset_in_base(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Return where a tensor begins on another one that it shares storage with, in elements of the tensor's dtype."""
    distance = tensor.storage_offset() * tensor.element_size() - base.storage_offset() * base.element_size()
    return distance // tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTensor:
    """A tensor that is stored, and that other tensors are views of."""

    name: str
    tensor: torch.Tensor
    # A tensor of the model on the same storage; it may be `tensor`.
    member: torch.Tensor


def base_tensors(tensors: Mapping[str, torch.Tensor], taken_names: Container[str]) -> dict[str, BaseTensor | None]:
    """Find the stored tensor that each tensor is a view of, maybe itself; None for one that is dense and shares no memory."""
    groups: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        # Tensors without elements share nothing.
        group_key = storage_key(tensor) if tensor.numel() else (tensor_name,)
        groups.setdefault(group_key, {})[tensor_name] = tensor
    base_of: dict[str, BaseTensor | None] = {}
    for group in groups.values():
        base_of |= dict.fromkeys(group, _base_of_group(group, taken_names))
    return base_of


def _base_of_group(group: Mapping[str, torch.Tensor], taken_names: Container[str]) -> BaseTensor | None:
    first_tensor = next(iter(group.values()))
    if len(group) == 1 and is_dense(first_tensor.shape, first_tensor.stride()):
        return None
    spans = [byte_span(tensor) for tensor in group.values()]
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    for tensor_name, tensor in group.items():
        if byte_span(tensor) == (start, end) and tensor.is_contiguous():
            return BaseTensor(name=tensor_name, tensor=tensor, member=tensor)
    return _new_base(group, start, end, taken_names)


def _new_base(group: Mapping[str, torch.Tensor], start: int, end: int, taken_names: Container[str]) -> BaseTensor:
    """A tensor over all the bytes that a group reaches; of bytes, if the tensors of the group differ in dtype."""
    first_name, first_tensor = next(iter(group.items()))
    dtypes = {tensor.dtype for tensor in group.values()}
    dtype = first_tensor.dtype if len(dtypes) == 1 else torch.uint8
    start -= start % max(tensor.element_size() for tensor in group.values())
    extent = torch.Size([(end - start) // dtype.itemsize])
    whole = torch.empty(0, dtype=dtype, device=first_tensor.device).set_(
        first_tensor.untyped_storage(), start // dtype.itemsize, extent, (1,)
    )
    candidates = (f"{first_name}.storage{'_' * count}" for count in itertools.count())
    return BaseTensor(
        name=next(tensor_name for tensor_name in candidates if tensor_name not in taken_names),
        tensor=whole,
        member=first_tensor,
    )


class StoredTensorSource(NamedTuple):
    """A tensor to write into a weight file, and the function that returns it contiguous."""

    spec: TensorSpec
    contiguous: Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The weights of a model."""

    # The entries, in the order of the model.
    weights: tuple[Weight, ...]
    # The name of the value that stands for a weight, by each of its fully qualified names.
    values: Mapping[str, str]
    # The tensors to write, by stored name.
    stored: Mapping[str, StoredTensorSource]
    # The tensors of the model by fully qualified name; they are not copied.
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

    def require_data(self) -> None:
        """Refuse the table if a tensor has no data, though no checkpoint has it."""
        for tensor_name, tensor in self.tensors.items():
            if isinstance(tensor, FakeTensor):
                raise UnsupportedError(
                    f"the tensor {tensor_name!r} has no data: it is a FakeTensor: make the model outside of FakeTensorMode"
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
    deferred: DeferredTensors | None = None,
) -> WeightTable:
    """Describe the tensors of a model.

    store_zeros: store persistent buffers of all zeros, too. Else, as of other buffers and constants, no file has bytes of them.
    deferred: where the data of tensors is that have none in memory.
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
        zeros = base is None and kind not in always_stored and _holds_zeros(_data(tensor, deferred))
        weight = _weight(f"w{weight_index}", weight_names, kind, tensor, base, zeros=zeros)
        weights.append(weight)
        values.update(dict.fromkeys(weight_names, weight.value))
        source = tensor if base is None else base.tensor
        spec = TensorSpec(name=weight.stored, dtype=dtype_name(source.dtype), shape=tuple(source.shape))
        contiguous = partial(_contiguous, source, tensor if base is None else base.member, deferred)
        stored.setdefault(weight.stored, StoredTensorSource(spec, contiguous))
    return WeightTable(weights=tuple(weights), values=values, stored=stored, tensors=tensor_of)


def _holds_zeros(data: torch.Tensor) -> bool:
    """Whether every bit is zero; a tensor of a model without data, of which a plan can be made, is not known to be."""
    return not isinstance(data, FakeTensor) and is_all_zeros(data)


def _data(tensor: torch.Tensor, deferred: DeferredTensors | None) -> torch.Tensor:
    return tensor if deferred is None else deferred.real(tensor)


def _contiguous(source: torch.Tensor, member: torch.Tensor, deferred: DeferredTensors | None) -> torch.Tensor:
    """The elements of a tensor, which may be a view of all that is in the storage of a `member` of the model."""
    data = _data(member, deferred).detach()
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
    has_own_strides = tensor.numel() > 0 and tuple(tensor.stride()) != row_major_strides(tensor.shape)
    return Weight(
        value=value_name,
        names=weight_names,
        kind=kind,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        trainable=tensor.requires_grad and tensor.is_leaf,
        # The stride of a dimension of size 1 counts: operators choose the memory format of their results by strides.
        strides=tuple(tensor.stride()) if is_view or has_own_strides else None,
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


def fill_module(
    model: torch.nn.Module,
    deferred: DeferredTensors,
    weights: WeightTable,
    locations: TensorLocations,
    written_names: Collection[str],
) -> None:
    """Give a model whose weights are deferred the data of their weights, mapped from files for reading only.

    Their addresses are aligned as in every loaded bundle, so that kernels give the same bits.
    """
    fake_tensors = weights.tensors
    entries = {id(fake_tensors[weight_name]): weight for weight in weights.weights for weight_name in weight.names}
    known: dict[int, torch.Tensor] = {}

    def filled(fake_tensor: torch.Tensor) -> torch.Tensor:
        if id(fake_tensor) not in known:
            weight = entries.get(id(fake_tensor))
            is_mapped = weight is not None and _is_plain(weight) and weight.stored in locations
            if weight is not None and is_mapped and not set(weight.names) & set(written_names):
                path, stored = locations[weight.stored]
                data = map_tensor(path, stored.start, fake_tensor.dtype, tuple(fake_tensor.shape))
            else:
                data = deferred.real(fake_tensor).detach().clone()
            is_parameter = isinstance(fake_tensor, torch.nn.Parameter)
            known[id(fake_tensor)] = (
                torch.nn.Parameter(data, requires_grad=fake_tensor.requires_grad) if is_parameter else data
            )
        return known[id(fake_tensor)]

    _replace_tensors(model, lambda tensor: filled(tensor) if tensor in deferred else tensor)


def _is_plain(weight: Weight) -> bool:
    """Whether a weight is in its file as it is in memory."""
    return weight.base is None and weight.strides is None and not weight.zeros


def _replace_tensors(model: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for submodule in model.modules():
        for of_parameters in (True, False):
            for tensor_name, tensor in list(weight_tensors(submodule, parameters=of_parameters).items()):
                if tensor is not None and (new_tensor := replacement(tensor)) is not tensor:
                    # Not into the dict: modules such as LSTM keep lists of their parameters, which their own method updates.
                    setattr(submodule, tensor_name, new_tensor)
