"""Deltas of checkpoints, as Slime and ModelExpress publish them: read as new weights of a bundle, and written of two bundles.

A folder has ``model.safetensors.index.json``, whose ``metadata`` states the version, the one before, and the encoding, and whose
``weight_map`` has the file of each tensor that changes. A tensor of these files is ``U8``: a frame of zstd with the XOR of all bytes
(``xor``), or with the number of bytes that change, their positions and new values (``overwrite``; numbers as ``<u4``). The metadata of a
file has the checksum of the new bytes of each of its tensors, in hexadecimal. No file has a digest of its base.

The format was read in THUDM/slime at 624b824a (``slime/utils/disk_delta.py``, ``update_weight_from_disk_delta.py`` of its Megatron
backend, ``docker/patch/latest/sglang-pull_weights.patch``) and in ai-dynamo/modelexpress at 008f0da0 and 076fe240
(``train/methods/canonical_delta.py``, ``inference/receiver.py`` of ``modelexpress_rl``): ``xor`` with ``adler32``, which Slime reads too.
"""

import contextlib
import importlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy
import torch
import zstandard
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stagepack.adapter.names import weights_by_name
from stagepack.capture.checkpoint import CheckpointTensor, read_checkpoint
from stagepack.capture.module_checkpoint import shown
from stagepack.errors import CaptureError, MissingPackageError, WriteError
from stagepack.format.chunks import File
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.file_writing import synchronize
from stagepack.format.graph import Weight
from stagepack.format.name_prefixes import placements
from stagepack.format.output_file import TemporaryFolder
from stagepack.format.reader import Bundle
from stagepack.format.rules import INDEX_NAME
from stagepack.format.weights import StoredTensor
from stagepack.format.writer import check_output_path
from stagepack.opening import BundleSource, errors_name_bundle, opened

_POSITION: Final = numpy.dtype("<u4")
_FILE_NAME: Final = "model-00000-of-00001.safetensors"
_Array = numpy.ndarray[Any, Any]


class IndexMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the index of a version states. Some trainers write versions as numbers."""

    version: str | int
    base_version: str | int
    delta_encoding: Literal["xor", "overwrite"]
    compression_format: Literal["zstd"] = "zstd"
    checksum_format: Literal["adler32", "blake3", "xxh3-128"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDelta:
    """An open delta of a checkpoint: the compressed change of each tensor, and the checksum of its new bytes, by its name there."""

    path: Path
    metadata: IndexMetadata
    frames: Mapping[str, CheckpointTensor]
    checksums: Mapping[str, str]

    def new_weights(self, bundle: Bundle) -> dict[str, CheckpointTensor]:
        """Return the weights that it changes in a bundle, by their names there. They are decoded, and compared, when they are read."""
        base_version = "" if bundle.patches is None else bundle.patches.version
        if base_version not in ("", found := str(self.metadata.base_version)):
            raise CaptureError(
                f"{self.path}: expected a delta on {base_version!r}, as the version of the bundle is named, found one on {found[:80]!r}: "
                "take the deltas in order, under the names of their trainer"
            )
        weights, base = weights_by_name(bundle), _StoredBytes(bundle)
        placed = placements(self.frames, weights)
        if len(placed) != 1:
            unknown = shown([name for name in self.frames if name not in weights])[:400]
            raise CaptureError(f"{self.path}: expected names of the bundle, maybe behind one prefix, found {unknown}")
        return {
            weight_name: CheckpointTensor(
                dtype=getattr(torch, weights[weight_name].dtype),
                shape=tuple(weights[weight_name].shape),
                read=partial(self._read, name, weights[weight_name], base),
            )
            for name, weight_name in placed[0].items()
        }

    def _read(self, name: str, weight: Weight, base: "_StoredBytes") -> torch.Tensor:
        content = base.read(weight.stored, math.prod(weight.shape) * ITEM_SIZE[weight.dtype])
        elements = numpy.frombuffer(content, numpy.uint8)
        try:
            _CHANGES[self.metadata.delta_encoding](elements, self.frames[name].read().numpy())
        except (ValueError, zstandard.ZstdError) as error:
            raise CaptureError(f"{self.path}: {name[:200]} cannot be decoded: {error}") from None
        found, expected = _checksum(self.metadata.checksum_format, content), self.checksums[name]
        if found != expected:
            raise CaptureError(
                f"{self.path}: {name[:200]}: expected the {self.metadata.checksum_format} {expected[:80]} of its new bytes, found {found}: "
                f"the delta is damaged, or is not on this bundle, but on the version {str(self.metadata.base_version)!r} of its trainer"
            )
        tensor = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return tensor.view(getattr(torch, weight.dtype)).reshape(tuple(weight.shape))


def open_checkpoint_delta(path: str | os.PathLike[str]) -> CheckpointDelta | None:
    """Open the folder of a version; None for anything else, such as a whole checkpoint."""
    folder = Path(path)
    metadata = None
    with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.DecodeError):
        metadata = msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=dict[str, Any]).get("metadata")
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return None
    try:
        facts = msgspec.convert(metadata, IndexMetadata)
        frames = read_checkpoint(folder / INDEX_NAME)
        checksums = _read_checksums(folder, frames)
    except (msgspec.ValidationError, SafetensorError, OSError) as error:
        raise CaptureError(f"{folder}: cannot be read as a delta of a checkpoint: {error}") from error
    return CheckpointDelta(path=folder, metadata=facts, frames=frames, checksums=checksums)


def _read_checksums(folder: Path, frames: Mapping[str, CheckpointTensor]) -> dict[str, str]:
    """Read the checksums from the headers of all files, whose tensors must be those of the index."""
    names_of_file: dict[Path, set[str]] = {file: set() for file in folder.glob("*.safetensors")}
    for name, frame in frames.items():
        if frame.location is None or frame.dtype != torch.uint8 or len(frame.shape) != 1:
            raise CaptureError(f"{folder}: {name[:200]}: expected compressed bytes in a file of safetensors")
        names_of_file.setdefault(frame.location.path, set()).add(name)
    checksums: dict[str, str] = {}
    for file, names in sorted(names_of_file.items()):
        with safe_open(file, framework="numpy") as tensors:
            stated = tensors.metadata() or {}
            if others := names.symmetric_difference(tensors.keys()) or names - stated.keys():
                raise CaptureError(
                    f"{file}: expected the tensors of the index, each with a checksum, found others: {shown(sorted(others))[:400]}"
                )
        checksums |= {name: stated[name] for name in names}
    return checksums


@errors_name_bundle
def write_checkpoint_delta(
    bundle: BundleSource, new: BundleSource, *, out: str | os.PathLike[str], version: str, base_version: str
) -> Path:
    """Write what differs between the weights of a bundle and its next version as Slime and ModelExpress publish it.

    Their engines apply the folder to the checkpoint that the bundle was made of: XOR of all bytes of each tensor that changes,
    compressed by zstd, with Adler-32 checksums, which both read. `stagepack.delta` reads such folders, these and those of the trainers.

    Args:
        bundle: the bundle before: its folder, its URL, or an opened bundle.
        new: the bundle after; ``stagepack.open(bundle, deltas=[...])`` for one that deltas make.
        out: the folder to write, such as ``weight_v000012``, as Slime names it. It must not exist.
        version: the name of the new version; for Slime a number of six digits.
        base_version: the name of the version of `bundle`; Slime calls the checkpoint that its engines begin with ``000000``.

    Returns:
        The folder.

    Raises:
        NotABundleError, VersionError, DigestError, FormatError: see `stagepack.open`.
        CaptureError: something else than parameters and persistent buffers differs, which no checkpoint has.
        OutputExistsError, WriteError: `out` exists, or cannot be written.
    """
    old_bundle, new_bundle = opened(bundle), opened(new)
    check_output_path(out, overwrite=False)
    frames: dict[str, _Array] = {}
    checksums: dict[str, str] = {}
    for name, old_bytes, new_bytes in _changed_weights(old_bundle, new_bundle):
        changes = numpy.bitwise_xor(numpy.frombuffer(old_bytes, numpy.uint8), numpy.frombuffer(new_bytes, numpy.uint8))
        compressed = zstandard.ZstdCompressor(level=1).compress(changes.data)
        frames[name] = numpy.frombuffer(compressed, numpy.uint8)
        checksums[name] = _checksum("adler32", new_bytes)
    metadata = IndexMetadata(
        version=version, base_version=base_version, delta_encoding="xor", checksum_format="adler32"
    )
    index = {"metadata": msgspec.to_builtins(metadata), "weight_map": dict.fromkeys(frames, _FILE_NAME)}
    target = Path(os.path.abspath(out))
    try:
        with TemporaryFolder(target) as temporary:
            if frames:
                save_file(frames, temporary.path / _FILE_NAME, checksums)
            (temporary.path / INDEX_NAME).write_text(json.dumps(index))
            for path in (*temporary.path.iterdir(), temporary.path):
                synchronize(path)
            check_output_path(out, overwrite=False)
            temporary.path.rename(target)
    except OSError as error:
        raise WriteError(f"{out}: could not be written: {error.strerror or error}") from error
    return Path(out)


def _changed_weights(old: Bundle, new: Bundle) -> Iterator[tuple[str, bytearray, bytearray]]:
    """Yield the name of each weight that differs, and its bytes in both bundles."""
    new_weights = weights_by_name(new)
    facts, new_facts = (
        {name: (w.dtype, w.shape, w.names, w.kind, w.base) for name, w in weights.items()}
        for weights in (weights_by_name(old), new_weights)
    )
    if others := sorted(name for name in facts.keys() | new_facts if facts.get(name) != new_facts.get(name)):
        raise CaptureError(f"{new.location}: expected the weights of {old.location}, found others: {shown(others)}")
    old_bytes, new_bytes = _StoredBytes(old), _StoredBytes(new)
    for bundle, other in ((old, new), (new, old)):
        bundle.check_digests(entry.name for entry in bundle.listed if entry != other.files.get(entry.name))
    weights = {weight.stored: weight for weight in new_weights.values() if weight.base is None}
    for name, (entry, tensor) in (old_bytes.places | new_bytes.places).items():
        if name in old_bytes.places and old_bytes.places[name][0] == entry:
            continue
        before, after = (stored.read(name, tensor.end - tensor.start) for stored in (old_bytes, new_bytes))
        if before != after:
            if name not in weights or weights[name].kind not in ("parameter", "buffer"):
                raise CaptureError(
                    f"{new.location}: {name} differs, and is in no checkpoint: a constant, or part of a view"
                )
            yield name, before, after


class _StoredBytes:
    """The bytes of the stored tensors of a bundle.

    Attributes:
        places: the file and the position of each, by name. Those of zeros have none.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        stages = (stage for entry_point in bundle.entry_points for stage in entry_point.stages)
        weight_files = dict.fromkeys(file_name for stage in stages for file_name in stage.weights)
        self.places: dict[str, tuple[File, StoredTensor]] = {
            name: (bundle.files[file_name], tensor)
            for file_name, tensors in bundle.read_headers(weight_files)
            for name, tensor in tensors.items()
        }

    def read(self, name: str, size: int) -> bytearray:
        """Read a stored tensor of some bytes."""
        content = bytearray(size)
        if name in self.places:
            entry, tensor = self.places[name]
            with contextlib.ExitStack() as open_files:
                self._bundle.open_read(open_files, entry.name).fill(tensor.start, memoryview(content))
        return content


def _change_by_xor(elements: _Array, frame: _Array) -> None:
    numpy.bitwise_xor(elements, _decompress(frame, len(elements), len(elements)), out=elements)


def _change_by_values(elements: _Array, frame: _Array) -> None:
    width = _POSITION.itemsize
    content = _decompress(frame, width, width + len(elements) * (width + 1))
    count = int(content[:width].view(_POSITION)[0])
    if len(content) != width + count * (width + 1):
        raise ValueError(f"expected {count} positions and values, found {len(content) - width} bytes")
    positions = content[width : width * (count + 1)].view(_POSITION)
    if count and positions.max() >= len(elements):
        raise ValueError(f"expected positions below {len(elements)}, found {positions.max()}")
    elements[positions] = content[width * (count + 1) :]


_CHANGES: Final = {"xor": _change_by_xor, "overwrite": _change_by_values}


def _decompress(frame: _Array, least_bytes: int, most_bytes: int) -> _Array:
    """Decompress a frame. The size that it states is compared before memory is taken."""
    stated = zstandard.frame_content_size(frame.data)
    if stated > most_bytes:
        raise ValueError(f"expected at most {most_bytes} bytes, found {stated}")
    content = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=most_bytes, allow_extra_data=False)
    if not least_bytes <= len(content) <= most_bytes:
        raise ValueError(f"expected {least_bytes} to {most_bytes} bytes, found {len(content)}")
    return numpy.frombuffer(content, numpy.uint8)


def _checksum(kind: str, content: bytes | bytearray) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(content):08x}"
    if kind == "blake3":
        return blake3(content).hexdigest()
    try:
        return str(importlib.import_module("xxhash").xxh3_128_hexdigest(content))
    except ModuleNotFoundError as error:
        advice = "pip install xxhash, or let the trainer write others (--update-weight-delta-checksum blake3)"
        message = (
            f"the package 'xxhash' is not installed, and the delta has its checksums, the default of Slime: {advice}"
        )
        raise MissingPackageError(message, name="xxhash") from error
