"""Weight files: safetensors files without gaps, in which every tensor begins on a multiple of 64 bytes (SPEC W1 to W6).

The header is read and written here and not by the safetensors library, which offers neither a free order of the tensors nor their
byte ranges. The format is specified at https://github.com/huggingface/safetensors#format.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.dtypes import HEADER_DTYPES, HEADER_ITEM_SIZE, ITEM_SIZE, stored_shape
from stagepack.format.file_checks import open_regular_file
from stagepack.format.rules import METADATA_KEY, PADDING_PREFIX, parse_json, raise_problems, rule_error

ALIGNMENT = 64


class StoredTensor(Struct, frozen=True, kw_only=True):
    """A tensor of a weight file.

    Attributes:
        name: its name in the header.
        dtype: its dtype in the header, such as ``F32``.
        shape: its shape in the header.
        start: its first byte, from the start of the file.
        end: the byte after its last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorSpec(Struct, frozen=True, kw_only=True):
    """A tensor to be written.

    Attributes:
        name: its name in the header.
        dtype: its torch dtype, such as ``float32``.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def tensor_layout(tensors: Iterable[TensorSpec]) -> list[StoredTensor]:
    """Return the location of each tensor in a weight file that has the tensors in the given order."""
    specs = list(tensors)
    header, paddings = weight_file_header(specs)
    position = len(header)
    stored = []
    for spec, padding in zip(specs, paddings, strict=True):
        start, position = position + padding, position + padding + spec.nbytes
        shape = stored_shape(spec.dtype, spec.shape)
        stored.append(
            StoredTensor(name=spec.name, dtype=HEADER_DTYPES[spec.dtype], shape=shape, start=start, end=position)
        )
    return stored


def weight_file_header(tensors: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the header of a weight file that has the tensors in the given order.

    The data begins on a multiple of 64 bytes, and so does every tensor in it. Because safetensors allows no gaps, a tensor of bytes named
    ``__padding__N`` fills the space before a tensor.
    """
    fields: dict[str, dict[str, object]] = {}
    paddings: list[int] = []
    position = 0
    for tensor in tensors:
        padding = -position % ALIGNMENT
        if padding:
            fields[f"{PADDING_PREFIX}{len(paddings)}"] = {
                "dtype": "U8",
                "shape": [padding],
                "data_offsets": [position, position + padding],
            }
        paddings.append(padding)
        position += padding
        fields[tensor.name] = {
            "dtype": HEADER_DTYPES[tensor.dtype],
            "shape": list(stored_shape(tensor.dtype, tensor.shape)),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header, paddings


def read_weight_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of a weight file. The tensors themselves are not read."""
    with open_regular_file(path) as file:
        return parse_weight_header(file, path.name)


def parse_weight_header(file: BinaryIO | mmap.mmap, file_name: str) -> dict[str, StoredTensor]:
    """Check the header of a weight file that is open or in memory; see `read_weight_header`."""
    file_size = len(file) if isinstance(file, mmap.mmap) else os.fstat(file.fileno()).st_size
    return parse_header_bytes(file.read, file_size, file_name)


def parse_header_bytes(read: Callable[[int], bytes], file_size: int, file_name: str) -> dict[str, StoredTensor]:
    """Check the header of a weight file; see `read_weight_header`.

    read: returns the next bytes of the file; as many as it is called with, or fewer at the end of the file.
    """
    header_length = int.from_bytes(read(8), "little")
    if header_length > limits.WEIGHT_HEADER_BYTES:
        raise rule_error("L1", file_name, f"the header states {header_length} bytes")
    if file_size < 8 + header_length:
        raise rule_error("W1", file_name, f"the header states {header_length} bytes, the file has {file_size}")
    header = read(header_length)
    fields = parse_json(header, file_name)
    if not header.startswith(b"{"):
        raise rule_error("W2", file_name, "expected a header that is a JSON object and begins with {")
    metadata = fields.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise rule_error("W2", file_name, f"expected {METADATA_KEY} to be an object of strings")
    data_start = 8 + header_length
    tensors = {
        tensor_name: parse_header_entry(tensor_name, entry, data_start, file_name)
        for tensor_name, entry in fields.items()
    }
    raise_problems(_layout_problems(tensors.values(), data_start, file_size, file_name))
    return {
        tensor_name: tensor for tensor_name, tensor in tensors.items() if not tensor_name.startswith(PADDING_PREFIX)
    }


def parse_header_entry(tensor_name: str, entry: object, data_start: int, file_name: str) -> StoredTensor:
    """Check one entry of the header of a safetensors file, whose offsets count from the first byte of the data."""
    location = f"{file_name}: {tensor_name[:80]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise rule_error("W3", location, "expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > limits.RANK or not isinstance(offsets, list) or len(offsets) != 2:
        raise rule_error("W3", location, f"expected at most {limits.RANK} sizes and two offsets")
    if not all(type(size) is int and 0 <= size <= limits.TENSOR_ELEMENTS for size in (*shape, *offsets)):
        raise rule_error("W3", location, f"expected sizes and offsets from 0 to {limits.TENSOR_ELEMENTS}")
    # A tensor without elements may have sizes whose product other readers of safetensors cannot hold.
    if math.prod(size or 1 for size in shape) > limits.TENSOR_ELEMENTS:
        raise rule_error(
            "W3", location, f"expected at most {limits.TENSOR_ELEMENTS} as the product of the sizes above 0"
        )
    start, end = offsets
    if not isinstance(dtype, str) or dtype not in HEADER_ITEM_SIZE:
        shown = repr(dtype[:80]) if isinstance(dtype, str) else type(dtype).__name__
        raise rule_error("W4", location, f"expected a dtype of safetensors, found {shown}")
    if end - start != math.prod(shape) * HEADER_ITEM_SIZE[dtype]:
        raise rule_error("W4", location, f"the {end - start} bytes of its offsets do not fit the dtype and the shape")
    return StoredTensor(
        name=tensor_name, dtype=dtype, shape=tuple(shape), start=data_start + start, end=data_start + end
    )


def _layout_problems(
    tensors: Iterable[StoredTensor], data_start: int, file_size: int, file_name: str
) -> Iterator[Problem]:
    """Yield the problems of the positions of the tensors in a file."""
    position = data_start
    for tensor in tensors:
        location = f"{file_name}: {tensor.name[:80]}"
        if tensor.start != position:
            message = f"begins at byte {tensor.start}, expected {position}"
            yield Problem(rule="W5", where=location, message=message)
        if tensor.name.startswith(PADDING_PREFIX):
            if tensor.dtype != "U8" or tensor.end - tensor.start >= ALIGNMENT:
                message = f"expected padding of dtype U8 and of fewer than {ALIGNMENT} bytes"
                yield Problem(rule="W6", where=location, message=message)
        elif tensor.start % ALIGNMENT:
            message = f"begins at byte {tensor.start}, expected a multiple of {ALIGNMENT}"
            yield Problem(rule="W6", where=location, message=message)
        position = tensor.end
    if position != file_size:
        yield Problem(
            rule="W1", where=file_name, message=f"the tensors end at byte {position}, the file at {file_size}"
        )
