"""Facts about the values of a graph, and the arguments of operators as tensors without memory (SPEC G16)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stagepack.format.graph import (
    Argument,
    ComplexArg,
    DeviceArg,
    DictArg,
    ListArg,
    SliceArg,
    TupleArg,
    ValueArg,
)
from stagepack.torch_internals import storage_identity
from stagepack_loaders.torch.build import argument_names
from stagepack_loaders.torch.devices import parse_graph_device
from stagepack_loaders.torch.torch_attributes import torch_argument

META = torch.device("meta")
# Under autocast these are cast to one another.
CAST_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Layout(NamedTuple):
    """Where the elements of a tensor are, in elements of its storage."""

    strides: tuple[int, ...]
    offset: int
    storage_size: int


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        kind: the dtype of a tensor, or the class of a Python number.
        content: the sizes of a tensor, or the number; None for a size or number that depends on data.
        layout: of a tensor that is not contiguous in a storage of its own; None also where nothing is known of it. A graph states none.
    """

    kind: torch.dtype | type
    content: Any
    layout: Layout | None = None

    @property
    def is_known(self) -> bool:
        """Whether the value does not depend on data."""
        return self.content is not None and (type(self.content) is not tuple or None not in self.content)


class CallResult(NamedTuple):
    """What is known of what an operator or a subgraph returns.

    Attributes:
        facts: of each value; None for one that is neither tensor nor number. None in place of the list if nothing is known.
        is_sequence: whether it returns a sequence.
        reason: why it refuses its arguments; empty if it does not.
        reshaped: the arguments whose shape or strides it changes, as indices into `input_names` of the node.
        shared: pairs of a result and such an argument, by their indices, that share memory.
    """

    facts: Sequence[Fact | None] | None = None
    is_sequence: bool = False
    reason: str = ""
    reshaped: tuple[int, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


UNKNOWN_RESULT = CallResult()


class MetaValues:
    """The arguments of operators, with tensors on the device ``meta``."""

    def __init__(self, facts: Mapping[str, Fact], *, is_casting: bool, device: torch.device = META) -> None:
        self._facts = facts
        self._is_casting = is_casting
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, tuple[object, ...]] = {}

    def argument(self, argument: Argument) -> Any:
        """Return an argument as an operator takes it; None for a tensor whose sizes depend on data."""
        return torch_argument(argument, self._leaf)

    def is_reshaped(self, value_name: str) -> bool:
        """Whether the tensor of a value has another shape or other strides than the one that was passed to an operator."""
        tensor = self._tensors.get(value_name)
        return tensor is not None and _arrangement(tensor) != self._layouts[value_name]

    def shared_memory(self, returned: object, used_names: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """Return which results of an operator share memory with which values that it takes, as `CallResult.shared` has them."""
        memories = {value_name: storage_identity(tensor) for value_name, tensor in self._tensors.items()}
        return tuple(
            (result_index, used_names.index(value_name))
            for result_index, result in enumerate(returned if isinstance(returned, list | tuple) else [returned])
            if isinstance(result, torch.Tensor) and result.layout == torch.strided
            for value_name, memory in memories.items()
            if memory == storage_identity(result)
        )

    def _leaf(self, leaf: Argument) -> Any:
        match leaf:
            case ValueArg(name):
                fact = self._facts[name]
                return self._tensor(name, fact) if isinstance(fact.kind, torch.dtype) else fact.content
            case ComplexArg(real, imag):
                return complex(real, imag)
            case DeviceArg(name):
                if name is not None:
                    parse_graph_device(name)
                return self._device
            case _:
                return leaf

    def _tensor(self, value_name: str, fact: Fact) -> torch.Tensor | None:
        """The tensor of a value, the same for each use: an operator may write one of its arguments. None if its sizes depend on data."""
        if value_name not in self._tensors and fact.is_known:
            dtype = torch.float32 if self._is_casting and fact.kind in CAST_DTYPES else fact.kind
            self._tensors[value_name] = tensor = _empty(fact, dtype, self._device)  # type: ignore[arg-type]
            self._layouts[value_name] = _arrangement(tensor)
        return self._tensors.get(value_name)


def _empty(fact: Fact, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if fact.layout is None:
        return torch.empty(fact.content, dtype=dtype, device=device)
    strides, offset, storage_size = fact.layout
    return torch.empty(storage_size, dtype=dtype, device=device).as_strided(fact.content, strides, offset)


def _arrangement(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def argument_key(argument: Argument, facts: Mapping[str, Fact]) -> object:
    """A key that is equal for arguments that operators treat alike, as far as types and shapes go."""
    if isinstance(argument, ValueArg):
        return facts[argument.name]
    if isinstance(argument, ListArg | TupleArg):
        return (type(argument), *[argument_key(item, facts) for item in argument.items])
    if isinstance(argument, DictArg | SliceArg):
        return (argument, *[facts[value_name] for value_name in argument_names(argument)])
    return (type(argument), argument)


def fact_of(value: object) -> Fact | None:
    """Return what is known of a result; None if it is neither a tensor nor a number."""
    if isinstance(value, torch.Tensor):
        return Fact(value.dtype, tuple(value.shape), _layout(value))
    return Fact(type(value), value) if isinstance(value, bool | int | float) else None


def _layout(tensor: torch.Tensor) -> Layout | None:
    if tensor.layout is not torch.strided:
        return None
    storage_size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() and storage_size == tensor.numel():
        return None
    return Layout(tensor.stride(), int(tensor.storage_offset()), storage_size)


def describe_fact(fact: Fact) -> str:
    """Return a fact as text, such as ``float32 [2, ?]``."""
    if isinstance(fact.kind, torch.dtype):
        sizes = ", ".join("?" if size is None else str(size) for size in fact.content)
        return f"{str(fact.kind).removeprefix('torch.')} [{sizes}]"
    return fact.kind.__name__ if fact.content is None else f"{fact.kind.__name__} {fact.content}"


def is_fitting(fact: Fact, stated: Fact, *, is_casting: bool) -> bool:
    """Whether a value is what a graph states, as far as both are known. Inside autocast, dtypes that are cast to one another are alike."""
    if fact.kind is not stated.kind and not (is_casting and fact.kind in CAST_DTYPES and stated.kind in CAST_DTYPES):
        return False
    if fact.content == stated.content or fact.content is None or stated.content is None:
        return True
    if type(fact.content) is not tuple or type(stated.content) is not tuple:
        return False
    return len(fact.content) == len(stated.content) and all(
        None in (size, expected) or size == expected
        for size, expected in zip(fact.content, stated.content, strict=True)
    )
