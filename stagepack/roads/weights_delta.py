"""New weights of a bundle, from memory or a checkpoint -> the changed files of the next version, which is never written as a whole.

The next version has the graphs, edges and plan of the bundle. The recorded example and ONNX files belong to the old weights: it has none.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from stagepack.capture.checkpoint import CheckpointTensor
from stagepack.deltas.document import ChangedFile
from stagepack.deltas.encoding import EncodedFile, FileVersions, plain_segments, weight_segments
from stagepack.errors import CaptureError
from stagepack.format.chunk_reads import Fill
from stagepack.format.chunks import File
from stagepack.format.manifest import EntryPoint
from stagepack.format.manifest_codec import encode_manifest, parse_manifest
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor
from stagepack.format.writer import BundleWriter
from stagepack.linearize.weight_table import is_all_zeros
from stagepack.roads.replace import Replacements, find_replacements, octets

_KEPT_TENSORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NextVersion:
    """What is written of the next version.

    Attributes:
        changed: the changed files.
        manifest: its manifest.
        name: its name, if the weights state one.
    """

    changed: list[ChangedFile]
    manifest: bytes
    name: str = ""


def write_weight_changes(
    writer: BundleWriter, bundle: Bundle, source: str | os.PathLike[str] | Mapping[str, Any]
) -> NextVersion:
    """Write the data files of the weight files that other weights change, file by file."""
    found = find_replacements(bundle, source)
    check_zeros(found)
    changed: list[ChangedFile] = []
    entries: list[File] = []
    for entry in next_files(bundle):
        with contextlib.ExitStack() as open_files:
            versions = file_versions(bundle, entry, found, open_files)
            if versions is None:
                entries.append(entry)
                continue
            encoded = EncodedFile(versions)
            changed_file = encoded.write(writer, len(changed))
        entries.append(encoded.entry)
        if encoded.entry == entry:
            writer.discard_file(changed_file.data)
        else:
            changed.append(changed_file)
    return NextVersion(changed=changed, manifest=next_manifest(bundle, entries), name=found.version)


def check_zeros(found: Replacements) -> None:
    """Refuse new weights that are not zeros for weights that are: no file has their bytes."""
    for weight in found.weights.values():
        tensor = found.replacements.get(weight.stored)
        if weight.zeros and tensor is not None and not is_all_zeros(tensor.read().contiguous().cpu()):
            raise CaptureError(
                f"{found.source_name}: {weight.names[0]} is zeros in the graph, which stores none of its bytes, and is not any more: "
                "export the next version (--graph-from), and make the delta of the two bundles"
            )


def next_files(bundle: Bundle) -> list[File]:
    """Return the files of a bundle that its next version has too, in the order in which a delta lists them."""
    left_out = _left_out_files(bundle.entry_points)
    kept = (entry for entry in bundle.listed if entry.name not in left_out)
    return sorted(kept, key=lambda entry: entry.name.lower())


def next_manifest(bundle: Bundle, entries: Iterable[File]) -> bytes:
    """Return the manifest of the next version, which has some files."""
    manifest = replace(
        bundle.manifest,
        entry_points=tuple(map(_without_answers, bundle.entry_points)),
        files=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
    content = encode_manifest(manifest)
    parse_manifest(content, bundle.location)
    return content


def weight_file_names(bundle: Bundle) -> set[str]:
    """Return the names of the weight files."""
    return {name for entry_point in bundle.entry_points for stage in entry_point.stages for name in stage.weights}


def file_versions(
    bundle: Bundle, entry: File, found: Replacements, open_files: contextlib.ExitStack
) -> FileVersions | None:
    """Return both versions of a file; None if it stays as it is."""
    if entry.name in found.files:
        content = memoryview(found.files[entry.name])
        return FileVersions(
            name=entry.name,
            size=len(content),
            segments=plain_segments(len(content)),
            read_new=lambda start, memory: _copy(content, start, memory),
            old_entry=entry,
            read_old=bundle.open_read(open_files, entry.name).fill,
        )
    if entry.name not in weight_file_names(bundle):
        return None
    bundle.fetch([entry.name])
    [(_, tensors)] = bundle.read_headers([entry.name])
    read_old = bundle.open_read(open_files, entry.name).fill
    replaced = [(tensor, found.replacements[name]) for name, tensor in tensors.items() if name in found.replacements]
    return FileVersions(
        name=entry.name,
        size=entry.size,
        segments=weight_segments(tensors, entry.size),
        read_new=_ReplacedTensors(read_old, replaced).fill,
        old_entry=entry,
        read_old=read_old,
    )


def _copy(content: memoryview, start: int, memory: memoryview) -> None:
    memory[:] = content[start : start + len(memory)]


class _ReplacedTensors:
    """A weight file whose tensors have the bytes of others. A tensor is read once for all chunks that it is in."""

    def __init__(self, read_old: Fill, replaced: list[tuple[StoredTensor, CheckpointTensor]]) -> None:
        self._read_old = read_old
        self._replaced = replaced
        self._lock = threading.Lock()
        self._octets = lru_cache(_KEPT_TENSORS)(lambda index: octets(replaced[index][1]))

    def fill(self, start: int, memory: memoryview) -> None:
        """Fill memory with bytes of the file."""
        self._read_old(start, memory)
        end = start + len(memory)
        for index, (stored, _) in enumerate(self._replaced):
            first, last = max(stored.start, start), min(stored.end, end)
            if first < last:
                with self._lock:
                    content = self._octets(index)
                memory[first - start : last - start] = content[first - stored.start : last - stored.start]


def _left_out_files(entry_points: Iterable[EntryPoint]) -> set[str]:
    """The examples and ONNX files."""
    names = {entry_point.example or "" for entry_point in entry_points}
    return names.union(*(stage.onnx_files for entry_point in entry_points for stage in entry_point.stages))


def _without_answers(entry_point: EntryPoint) -> EntryPoint:
    stages = tuple(replace(stage, onnx=None) for stage in entry_point.stages)
    return replace(entry_point, stages=stages, example=None)
