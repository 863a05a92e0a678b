"""Weight files: safetensors, in any order, without holes, every tensor on a multiple of 64 bytes (SPEC W1 to W7).

The header is read and written here, because a stage wants first-use order and byte ranges, which the
safetensors library does not offer; the format is that of its README.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.codec import parse_json
from stagepack.format.dtypes import ITEM_SIZE, STORED_NAME, STORED_SIZE, stored_shape

ALIGNMENT = 64
PADDING = "__padding__"  # names of padding tensors begin so


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


def header(tensors: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
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
            fields[f"{PADDING}{len(gaps)}"] = {
                "dtype": "U8",
                "shape": [gap],
                "data_offsets": [position, position + gap],
            }
        gaps.append(gap)
        position += gap
        fields[tensor.name] = {
            "dtype": STORED_NAME[tensor.dtype],
            "shape": list(stored_shape(tensor.dtype, tensor.shape)),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, gaps


def read_index(path: Path) -> dict[str, StoredTensor]:
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
            raise FormatError(
                [Problem(rule="W1", where=where, message=f"the header states {length} bytes, the file has {size}")]
            )
        fields = parse_json(file.read(length), where)
    if not isinstance(fields, dict):
        raise FormatError([Problem(rule="W2", where=where, message="the header is not a JSON object")])
    fields.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    position = 8 + length
    problems = []
    for name, entry in fields.items():
        tensor = _stored(name, entry, 8 + length)
        if tensor is None:
            problems.append(
                Problem(
                    rule="W3",
                    where=f"{where}: {name[:80]}",
                    message="not a tensor entry whose bytes fit its dtype and shape",
                )
            )
            break
        if tensor.start != position:
            problems.append(
                Problem(
                    rule="W5",
                    where=f"{where}: {name[:80]}",
                    message=f"begins at byte {tensor.start}, expected {position}",
                )
            )
        position = tensor.end
        tensors[name] = tensor
    if not problems and position != size:
        problems.append(
            Problem(rule="W1", where=where, message=f"the tensors end at byte {position}, the file at {size}")
        )
    for tensor in tensors.values():
        if tensor.start % ALIGNMENT and not tensor.name.startswith(PADDING):
            problems.append(
                Problem(
                    rule="W6",
                    where=f"{where}: {tensor.name[:80]}",
                    message=f"byte {tensor.start} is not a multiple of {ALIGNMENT}",
                )
            )
    if problems:
        raise FormatError(problems)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PADDING)}


def _stored(name: str, entry: object, data_start: int) -> StoredTensor | None:
    """The entry of a header as a type, or None when it is not one."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in STORED_SIZE or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(type(number) is int and 0 <= number <= limits.ELEMENTS for number in [*shape, *offsets]):
        return None
    if len(shape) > limits.RANK or offsets[1] - offsets[0] != math.prod(shape) * STORED_SIZE[dtype]:
        return None
    return StoredTensor(
        name=name, dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], end=data_start + offsets[1]
    )
