"""Hostile arguments for operators: other shapes, dtypes and layouts, indices past the end, huge and negative numbers.

An argument is drawn by its type in the schema of the operator. Where torch's own tests have valid calls of the operator (``OpInfo``), half
of the calls are valid ones in which one or two arguments are replaced. An integer never stands for a dtype, layout or memory format:
loaders refuse it.
"""

import ctypes
import math
import mmap
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from stagepack.torch_internals import OperatorOverload, operator_schema, tree_map

Call = dict[str, Any]

_SIZES: Final = [0, 1, 1, 2, 2, 3, 3, 4, 5, 8, 17]
_INTEGERS: Final = [-2, -1, -1, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 7, 16, 100]
_HUGE_INTEGERS: Final = [
    -(2**63),
    -(2**62),
    -(2**31) - 1,
    -(2**31),
    -1000,
    1000,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
]
_FLOATS: Final = [0.0, 0.5, 1.0, -1.0, 2.0, 1e-8, 1e8, 1e38, 1e308, -1e308, math.inf, -math.inf, math.nan]
_STRINGS: Final = [
    "mean",
    "sum",
    "none",
    "fro",
    "nuc",
    "reflect",
    "linear",
    "floor",
    "trunc",
    "ij",
    "xy",
    "prod",
    "amax",
    "fweights",
    "tanh",
]
_STRINGS_HOSTILE: Final = ["", "x" * 5000, "i,j->ij", "ij,jk->ik", "...", "a->", "->", "\0"]
_DTYPES: Final = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
_DEVICES: Final = ["cpu", "cpu", "cpu", "meta", "cuda:0"]
_LAYOUTS: Final = [torch.strided, torch.strided, torch.sparse_coo, torch.sparse_csr]
_MEMORY_FORMATS: Final = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
_INDEX_WORDS: Final = ("ind", "idx", "offs", "length", "target", "bucket", "batch_sizes", "repeats", "sections")
_PAGE: Final = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def hostile_calls(operator: OperatorOverload, valid_calls: Sequence[Call], first: int, count: int) -> Iterator[Call]:
    """Yield the arguments of calls by their names; the same for the same operator, number and valid calls.

    Args:
        operator: the operator.
        valid_calls: valid calls of it. Calls that turn out to be valid may be added between two calls.
        first: the number of the first call.
        count: how many to make.
    """
    for call_number in range(first, first + count):
        chance = random.Random(f"{operator}/{call_number}")  # noqa: S311 - repeatable
        torch.manual_seed(call_number)
        generator = _Generator(chance)
        if valid_calls and call_number % 2:
            yield generator.changed_call(operator, chance.choice(valid_calls))
        else:
            yield generator.random_call(operator)


class _Generator:
    """Draws the arguments of one call. Its tensors often have one shape, and are often one tensor."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._shape = self._random_shape()
        self._dtype = chance.choice(_DTYPES) if chance.random() < 0.3 else torch.float32
        self._tensors: list[torch.Tensor] = []

    def random_call(self, operator: OperatorOverload) -> Call:
        """Return arguments that are drawn by their types."""
        return {
            argument.name: self._value(str(argument.real_type), argument.name)
            for argument in operator_schema(operator).arguments
            if not argument.has_default_value() or self._chance.random() < 0.5
        }

    def changed_call(self, operator: OperatorOverload, valid_call: Call) -> Call:
        """Return a valid call in which one or two arguments, or the values or the shape of a tensor, are replaced."""
        call = copy_tensors(valid_call)
        arguments = operator_schema(operator).arguments
        for argument in self._chance.sample(arguments, min(len(arguments), self._chance.choice([1, 1, 2]))):
            value = call.get(argument.name)
            if isinstance(value, torch.Tensor) and self._chance.random() < 0.7:
                call[argument.name] = self._changed_tensor(value)
            elif isinstance(value, list) and _tensor_indices(value) and self._chance.random() < 0.7:
                index = self._chance.choice(_tensor_indices(value))
                changed = [] if self._chance.random() < 0.2 else [self._changed_tensor(value[index])]
                call[argument.name] = [*value[:index], *changed, *value[index + 1 :]]
            else:
                call[argument.name] = self._value(str(argument.real_type), argument.name)
        guarded: Call = tree_map(lambda leaf: _guarded(leaf) if isinstance(leaf, torch.Tensor) else leaf, call)
        return guarded

    def _changed_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = self._chance.randrange(6)
        shape = list(tensor.shape)
        if kind == 0 and shape:
            shape[self._chance.randrange(len(shape))] = self._chance.choice(_SIZES)
            return self._tensor_of(shape, tensor.dtype, tensor.dtype == torch.int64)
        if kind == 1:
            return (
                tensor.unsqueeze(0)
                if self._chance.random() < 0.5 or not shape
                else tensor.select(0, 0)
                if shape[0]
                else tensor
            )
        if kind == 2:
            return tensor.to(self._chance.choice(_DTYPES))
        if kind == 3:
            return self._overlapping(tensor)
        return self._tensor_of(shape, tensor.dtype, is_index=True)

    def _overlapping(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, with less memory than elements: kernels must not count on one element after another."""
        if not tensor.dim() or not tensor.numel():
            return tensor
        if self._chance.random() < 0.5:
            dim = self._chance.randrange(tensor.dim())
            return _guarded(tensor.narrow(dim, 0, 1).contiguous()).expand(tensor.shape)
        element_count = 1 + sum(size - 1 for size in tensor.shape)
        return _guarded(tensor.flatten()[:element_count]).as_strided(tensor.shape, [1] * tensor.dim())

    def _value(self, type_name: str, name: str) -> Any:
        optional = re.fullmatch(r"Optional\[(.*)\]|(.*)\?", type_name)
        if optional:
            return None if self._chance.random() < 0.3 else self._value(optional[1] or optional[2], name)
        sequence = re.fullmatch(r"List\[(.*)\]|(.*)\[\d*\]", type_name)
        if sequence:
            return self._list(sequence[1] or sequence[2], name)
        return self._tensor(name) if type_name == "Tensor" else self._constant(type_name)

    def _constant(self, type_name: str) -> Any:
        chance = self._chance
        match type_name:
            case "int" | "SymInt":
                return chance.choice(_HUGE_INTEGERS if chance.random() < 0.2 else _INTEGERS)
            case "float":
                return chance.choice(_FLOATS)
            case "bool":
                return chance.random() < 0.5
            case "Scalar" | "number":
                return chance.choice([*_INTEGERS, *_HUGE_INTEGERS, *_FLOATS, True, 1j, complex(math.nan, math.inf)])
            case "str" | "Dimname":
                return chance.choice(_STRINGS if chance.random() < 0.8 else _STRINGS_HOSTILE)
            case "ScalarType":
                return chance.choice(_DTYPES)
            case "Device":
                return torch.device(chance.choice(_DEVICES))
            case "Layout":
                return chance.choice(_LAYOUTS)
            case "MemoryFormat":
                return chance.choice(_MEMORY_FORMATS)
            case _:  # generators, streams and storages: a bundle cannot hold them
                return None

    def _list(self, item_type: str, name: str) -> list[Any]:
        length = self._chance.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6])
        if item_type in ("int", "SymInt") and self._chance.random() < 0.7:
            return [self._chance.choice(_INTEGERS[2:-2]) for _ in range(length)]
        return [self._value(item_type, name) for _ in range(length)]

    def _tensor(self, name: str) -> torch.Tensor:
        chance = self._chance
        if self._tensors and chance.random() < 0.1:
            return chance.choice(self._tensors)
        is_index = any(word in name for word in _INDEX_WORDS)
        dtype = self._dtype if chance.random() < 0.8 else chance.choice(_DTYPES)
        if is_index and chance.random() < 0.8:
            dtype = chance.choice([torch.int64, torch.int64, torch.int32])
        if "mask" in name and chance.random() < 0.6:
            dtype = torch.bool
        shape = self._shape if chance.random() < 0.5 else self._random_shape()
        tensor = self._tensor_of(shape, dtype, is_index)
        layout = chance.random()
        if layout < 0.05:
            tensor = tensor.transpose(0, -1) if tensor.dim() else tensor
        elif layout < 0.1:
            tensor = self._overlapping(tensor)
        elif layout < 0.12:
            tensor = tensor.to("meta")
        self._tensors.append(tensor)
        return tensor

    def _random_shape(self) -> list[int]:
        return [self._chance.choice(_SIZES) for _ in range(self._chance.choice([0, 1, 1, 2, 2, 3, 3, 4, 4, 5]))]

    def _tensor_of(self, shape: Sequence[int], dtype: torch.dtype, is_index: bool) -> torch.Tensor:
        """A tensor whose memory ends where readable memory ends; integers are past the end of any dimension now and then."""
        values = torch.randn(list(shape), dtype=torch.float64)
        if not dtype.is_floating_point and not dtype.is_complex:
            values *= self._chance.choice([1, 3, 20, 1000, 1e9, 1e18] if is_index else [1, 10, 100])
            if self._chance.random() < 0.5:
                values = values.abs()
            if (
                dtype != torch.bool and self._chance.random() < 0.1
            ):  # for example the smallest integer, and -1 to divide it by
                extremes = [torch.iinfo(dtype).min, torch.iinfo(dtype).max, -1, 0]
                count = self._chance.choice([1, 4])
                return _guarded(
                    torch.tensor(self._chance.choices(extremes[:count], k=values.numel()))
                    .to(dtype)
                    .reshape(list(shape))
                )
        elif self._chance.random() < 0.2 and values.numel():
            values.view(-1)[self._chance.randrange(values.numel())] = self._chance.choice(_FLOATS)
        return _guarded(values.to(dtype))


def _tensor_indices(items: Sequence[object]) -> list[int]:
    """Return where tensors are in a list."""
    return [index for index, item in enumerate(items) if isinstance(item, torch.Tensor)]


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor in memory of its own, behind which a page is not readable."""
    byte_count = tensor.numel() * tensor.element_size()
    if not byte_count or not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor
    pages = -(-byte_count // _PAGE)
    private_anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, (pages + 1) * _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous, -1, 0)
    _libc.mprotect(address + pages * _PAGE, _PAGE, 0)
    memory = (ctypes.c_char * byte_count).from_address(address + pages * _PAGE - byte_count)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def copy_tensors(call: Call) -> Call:
    """Return the same arguments with tensors of their own."""
    copied: Call = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, call)
    return copied


def bind(operator: OperatorOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a call by their names."""
    names = [argument.name for argument in operator_schema(operator).arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
