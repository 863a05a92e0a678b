"""Weight files: safetensors, in any order, without holes, every tensor on a multiple of 64 bytes (SPEC W1 to W7).

The header is read and written here, because a stage wants first-use order and byte ranges, which the
safetensors library does not offer; the format is that of its README.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.codec import parse_json
from stagepack.format.dtypes import HEADER_DTYPES, HEADER_ITEM_SIZE, ITEM_SIZE, stored_shape

ALIGNMENT = 64
PADDING_PREFIX = "__padding__"  # names of padding tensors begin so
METADATA_KEY = "__metadata__"  # not a tensor: texts by name, which no reader of a bundle uses


class StoredTensor(Struct, frozen=True, kw_only=True):
    """A tensor of a weight file: `start` and `end` are bytes from the start of the file, `end` excluded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorSpec(Struct, frozen=True, kw_only=True):
    """A tensor to be written; `dtype` is a torch name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def tensor_layout(tensors: Iterable[TensorSpec]) -> list[StoredTensor]:
    """Where each tensor lies in a file that holds them in the order given."""
    specs = list(tensors)
    head, gaps = weight_file_header(specs)
    position = len(head)
    found = []
    for spec, gap in zip(specs, gaps, strict=True):
        start, position = position + gap, position + gap + spec.nbytes
        shape = stored_shape(spec.dtype, spec.shape)
        found.append(
            StoredTensor(name=spec.name, dtype=HEADER_DTYPES[spec.dtype], shape=shape, start=start, end=position)
        )
    return found


def weight_file_header(tensors: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    """The header of a file that holds the tensors in the order given, and the padding in bytes before each.

    The data begins on a multiple of 64 bytes, and so does every tensor in it: where one ends elsewhere, a tensor of
    bytes named ``__padding__N`` fills the gap, since safetensors allows no holes.
    """
    fields: dict[str, dict[str, object]] = {}
    gaps: list[int] = []
    position = 0
    for tensor in tensors:
        gap = -position % ALIGNMENT
        if gap:
            fields[f"{PADDING_PREFIX}{len(gaps)}"] = {
                "dtype": "U8",
                "shape": [gap],
                "data_offsets": [position, position + gap],
            }
        gaps.append(gap)
        position += gap
        fields[tensor.name] = {
            "dtype": HEADER_DTYPES[tensor.dtype],
            "shape": list(stored_shape(tensor.dtype, tensor.shape)),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, gaps


def read_weight_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a weight file: its tensors by name in the order of the file, padding left out.

    Raises:
        FormatError: a rule W1 to W6 is broken.
        LimitError: the header is over the limit (L1).
    """
    where = path.name
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > limits.WEIGHT_HEADER_BYTES:
            raise LimitError([Problem(rule="L1", where=where, message=f"the header states {length} bytes")])
        if size < 8 + length:
            raise _error("W1", where, f"the header states {length} bytes, the file has {size}")
        text = file.read(length)
    fields = parse_json(text, where)
    if not text.startswith(b"{"):
        raise _error("W2", where, "the header is not a JSON object, or does not begin with one")
    if not _is_metadata(fields.pop(METADATA_KEY, {})):
        raise _error("W2", where, f"{METADATA_KEY} does not hold texts by name")
    tensors = {name: _stored(name, entry, 8 + length, where) for name, entry in fields.items()}
    problems = list(itertools.islice(_layout(tensors.values(), 8 + length, size, where), limits.REPORTED_PROBLEMS))
    if problems:
        raise FormatError(problems)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PADDING_PREFIX)}


def _error(rule: str, where: str, message: str) -> FormatError:
    return FormatError([Problem(rule=rule, where=where, message=message)])


def _is_metadata(fields: object) -> bool:
    return isinstance(fields, dict) and all(isinstance(text, str) for text in fields.values())


def _stored(name: str, entry: object, data_start: int, where: str) -> StoredTensor:
    """The entry of a header as a type."""
    where = f"{where}: {name[:80]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _error("W3", where, "expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > limits.RANK or not isinstance(offsets, list) or len(offsets) != 2:
        raise _error("W3", where, f"expected at most {limits.RANK} sizes and two offsets")
    if not all(type(number) is int and 0 <= number <= limits.TENSOR_ELEMENTS for number in (*shape, *offsets)):
        raise _error("W3", where, "a size or an offset is not one")
    start, end = offsets
    if (
        not isinstance(dtype, str)
        or dtype not in HEADER_ITEM_SIZE
        or end - start != math.prod(shape) * HEADER_ITEM_SIZE[dtype]
    ):
        raise _error("W4", where, "the dtype is not known, or the bytes do not fit the dtype and the shape")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), start=data_start + start, end=data_start + end)


def _layout(tensors: Iterable[StoredTensor], position: int, size: int, where: str) -> Iterator[Problem]:
    """The problems with the places of the tensors in a file of `size` bytes whose data begins at `position`."""
    for tensor in tensors:
        place = f"{where}: {tensor.name[:80]}"
        if tensor.start != position:
            message = f"begins at byte {tensor.start}, expected {position}"
            yield Problem(rule="W5", where=place, message=message)
        if tensor.name.startswith(PADDING_PREFIX):
            if tensor.dtype != "U8" or tensor.end - tensor.start >= ALIGNMENT:
                yield Problem(rule="W6", where=place, message=f"padding is not of fewer than {ALIGNMENT} bytes")
        elif tensor.start % ALIGNMENT:
            message = f"byte {tensor.start} is not a multiple of {ALIGNMENT}"
            yield Problem(rule="W6", where=place, message=message)
        position = tensor.end
    if position != size:
        yield Problem(rule="W1", where=where, message=f"the tensors end at byte {position}, the file at {size}")
