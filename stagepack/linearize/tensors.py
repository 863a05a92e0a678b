"""The tensors of a captured program -> entries of the weight table, and the bytes to store.

Tensors that share storage stay shared: equal views (tied weights) become one entry with several names; different
views become one stored tensor, the base, and entries that lie on it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagepack.errors import UnsupportedError
from stagepack.format.codec import is_plain
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Weight
from stagepack.format.validate import is_tensor_name
from stagepack.format.weights import TensorSpec

Kind = Literal["parameter", "buffer", "non_persistent_buffer", "constant"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The weights of a model.

    Attributes:
        weights: the entries, in the order of the model.
        values: each fully qualified name -> the name of the value that stands for it.
        stored: the tensors to write, by stored name; each is given contiguous when it is asked for.
        tensors: the tensors of the model by fully qualified name, where they are.
    """

    weights: tuple[Weight, ...]
    values: Mapping[str, str]
    stored: Mapping[str, tuple[TensorSpec, Callable[[], torch.Tensor]]]
    tensors: Mapping[str, torch.Tensor]


def weight_table(tensors: Mapping[str, tuple[Kind, torch.Tensor]], *, store_zeros: bool = False) -> WeightTable:
    """Describe tensors by their fully qualified names, in the model's order.

    Buffers and constants of all zeros are said to be so, and need no bytes; persistent ones are stored when `store_zeros` is true.

    Raises:
        UnsupportedError: a tensor has a layout, a type or a class that a weight file cannot hold; it is named.
    """
    for name, (_, tensor) in tensors.items():
        _require_plain(name, tensor)
    tied: dict[tuple[object, ...], list[str]] = {}
    for name, (kind, tensor) in tensors.items():
        key = (
            *_storage(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            kind,
            tensor.requires_grad,
        )
        # Tensors without elements share nothing: each is its own.
        tied.setdefault(key if tensor.numel() else (name,), []).append(name)
    sharing: dict[tuple[object, ...], list[str]] = {}
    for names in tied.values():
        tensor = tensors[names[0]][1]
        sharing.setdefault(_storage(tensor) if tensor.numel() else (names[0],), []).append(names[0])
    bases = {
        name: base
        for group in sharing.values()
        for name, base in _bases({name: tensors[name][1] for name in group}, tensors).items()
    }
    stored_kinds = ("parameter", "buffer") if store_zeros else ("parameter",)
    weights = []
    values = {}
    stored: dict[str, tuple[TensorSpec, Callable[[], torch.Tensor]]] = {}
    for number, names in enumerate(tied.values()):
        kind, tensor = tensors[names[0]]
        base = bases[names[0]]
        strided = not tensor.is_contiguous() or (base is not None and base.name != names[0])
        on_base = base is not None and base.name != names[0]
        weights.append(
            Weight(
                value=f"w{number}",
                names=tuple(names),
                kind=kind,
                dtype=_dtype(tensor),
                shape=tuple(tensor.shape),
                trainable=tensor.requires_grad and tensor.is_leaf,
                strides=tuple(tensor.stride()) if strided else None,
                base=base.name if base is not None and on_base else None,
                offset=_offset(tensor, base.tensor) if base is not None and on_base else 0,
                zeros=base is None and kind not in stored_kinds and _is_all_zeros(tensor),
            )
        )
        values.update(dict.fromkeys(names, f"w{number}"))
        name, source = (names[0], tensor) if base is None else (base.name, base.tensor)
        stored.setdefault(
            name, (TensorSpec(name=name, dtype=_dtype(source), shape=tuple(source.shape)), source.detach().contiguous)
        )
    plain = {name: tensor for name, (_, tensor) in tensors.items()}
    return WeightTable(weights=tuple(weights), values=values, stored=stored, tensors=plain)


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a weight consists of, with their names: itself, or for a tensor subclass those that it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(inner_name(name, attribute), getattr(tensor, attribute))


def inner_name(name: str, attribute: str) -> str:
    """The name of a tensor that lies in an attribute of a weight of a tensor subclass."""
    return f"{name}.{attribute}"


def _is_all_zeros(tensor: torch.Tensor) -> bool:
    """Whether every bit is zero; -0.0 has one that is not."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return not bool(flat.view(torch.uint8).any())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy when it is on the CPU."""
    # A dimension of size 1 may have any stride, which a view as bytes does not take: lay the elements out anew.
    flat = tensor.detach().cpu().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    name: str
    tensor: torch.Tensor


def _bases(group: Mapping[str, torch.Tensor], taken: Container[str]) -> dict[str, _Base | None]:
    """For tensors on one storage, the stored tensor that each lies on; None for one with bytes of its own."""
    if len(group) == 1 and _is_dense(next(iter(group.values()))):
        return dict.fromkeys(group)
    start = min(_span(tensor)[0] for tensor in group.values())
    end = max(_span(tensor)[1] for tensor in group.values())
    for name, tensor in group.items():
        if _span(tensor) == (start, end) and tensor.is_contiguous():
            return dict.fromkeys(group, _Base(name=name, tensor=tensor))
    first, tensor = next(iter(group.items()))
    dtype = tensor.dtype if len({tensor.dtype for tensor in group.values()}) == 1 else torch.uint8
    start -= start % max(tensor.element_size() for tensor in group.values())
    extent = torch.Size([(end - start) // dtype.itemsize])
    whole = torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), start // dtype.itemsize, extent, (1,)
    )
    free = (f"{first}.storage{'_' * number}" for number in itertools.count())
    return dict.fromkeys(group, _Base(name=next(name for name in free if name not in taken), tensor=whole))


def _storage(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.untyped_storage().data_ptr())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches, as a half-open range."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Where a tensor begins on its base, in elements of its own type."""
    distance = tensor.storage_offset() * tensor.element_size() - base.storage_offset() * base.element_size()
    return distance // tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the dimensions (SPEC G9)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != reach:
            return tensor.numel() == 0
        reach *= size
    return True


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if not is_tensor_name(name) or not is_plain(name):
        raise UnsupportedError(f"the tensor {name[:80]!r} cannot be stored under this name: rename it in the model")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        what = (
            f"class {type(tensor).__name__}"
            if not plain
            else f"layout {tensor.layout}"
            if tensor.layout != torch.strided
            else "lazy conjugate or negative bit"
        )
        raise UnsupportedError(
            f"the tensor {name!r} cannot be stored: {what}: make it a plain strided tensor before the export"
        )
    if _dtype(tensor) not in ITEM_SIZE:
        raise UnsupportedError(f"the tensor {name!r} cannot be stored: dtype {tensor.dtype}")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"the tensor {name!r} has no data: it is on the meta device")
    if math.prod(tensor.shape) and tensor.untyped_storage().size() == 0:
        raise UnsupportedError(f"the tensor {name!r} has no data: its storage is empty")
