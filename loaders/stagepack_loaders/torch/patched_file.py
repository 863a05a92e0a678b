"""A weight file of a new version, made by deltas from the running one: changed in memory, and compared with its digests by chunk."""

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from blake3 import blake3

from stagepack.errors import Problem
from stagepack.format.chunk_reads import FileRead
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.file_source import FilePatch
from stagepack.format.reader import Bundle
from stagepack.format.threads import map_in_threads
from stagepack.format.weights import StoredTensor
from stagepack_loaders.file_leases import new_memory
from stagepack_loaders.weight_changes import WeightChanges

# Larger tensors have memory of their own, which is freed with them; neighbours below are changed together, as a delta stores them.
_SMALL_BYTES: Final = 64 * 1024
_TOGETHER_BYTES: Final = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """A weight file that a patch makes of the one that runs.

    Attributes:
        bundle: its bundle.
        entry: its entry in the manifest.
        patch: makes its bytes from the bytes of the running version of the file.
        changes: which bytes the patch changes.
        needed: the tensors that are asked for, in the order of the file.
        running: the bytes of its tensors that are in memory, as they run, by name.
        composed: the bytes of its tensors that were made before.
    """

    bundle: Bundle
    entry: File
    patch: FilePatch
    changes: WeightChanges
    needed: Sequence[StoredTensor]
    running: Mapping[str, torch.Tensor]
    composed: Mapping[str, torch.Tensor]

    def compose(self, *, verify: bool) -> tuple[dict[str, torch.Tensor], list[Problem]]:
        """Return the bytes of the needed tensors by name, and the problems of the file.

        verify: compare the chunks that change with their digests, over what is in memory.
        """
        with contextlib.ExitStack() as open_files:
            read = self.bundle.open_read(open_files, self.entry.name)
            composed: dict[str, torch.Tensor] = {}
            for contents in map_in_threads(lambda run: self._compose_run(run, read), list(self._runs())):
                composed.update(contents)
            problems = self._problems({**self.running, **self.composed, **composed}, read) if verify else []
        return composed, problems

    def _runs(self) -> Iterator[list[StoredTensor]]:
        """The needed tensors: small neighbours together, others alone."""
        run: list[StoredTensor] = []
        for tensor in self.needed:
            is_small = tensor.end - tensor.start < _SMALL_BYTES
            if run and (not is_small or tensor.start != run[-1].end or tensor.end - run[0].start > _TOGETHER_BYTES):
                yield run
                run = []
            run.append(tensor)
            if not is_small:
                yield run
                run = []
        if run:
            yield run

    def _compose_run(self, run: Sequence[StoredTensor], read: FileRead) -> dict[str, torch.Tensor]:
        start, end = run[0].start, run[-1].end
        memory = _new_bytes(end - start)
        if all(tensor.name in self.running for tensor in run):
            for tensor in run:
                memory[tensor.start - start : tensor.end - start].copy_(self.running[tensor.name])
            self.patch.apply(start, memory.numpy().data)
        else:
            read.fill(start, memory.numpy().data)
        if len(run) == 1:
            return {run[0].name: memory}
        return {tensor.name: memory[tensor.start - start : tensor.end - start].clone() for tensor in run}

    def _problems(self, contents: Mapping[str, torch.Tensor], read: FileRead) -> list[Problem]:
        """The problem of a file of which a chunk that changes has another digest."""
        tensors = sorted(self._located(contents), key=lambda tensor: tensor.start)
        ends = [tensor.end for tensor in tensors]
        chunks = [
            chunk
            for chunk in file_chunks(self.entry)
            if self.changes.changes_range(self.entry.name, chunk.start, chunk.end)
        ]

        def is_right(chunk: FileChunk) -> bool:
            hasher, position = blake3(), chunk.start
            for tensor in itertools.islice(tensors, bisect.bisect_right(ends, chunk.start), None):
                if tensor.start >= chunk.end:
                    break
                first, last = max(tensor.start, chunk.start), min(tensor.end, chunk.end)
                hasher.update(_read(read, position, first))
                hasher.update(contents[tensor.name].numpy().data[first - tensor.start : last - tensor.start])
                position = last
            hasher.update(_read(read, position, chunk.end))
            return hasher.hexdigest() == chunk.digest

        if all(map_in_threads(is_right, chunks)):
            return []
        message = "the weights that run, with the changes of the delta, are not those of the result: load its bundle"
        return [Problem(rule="D2", where=self.entry.name, message=message)]

    def _located(self, contents: Mapping[str, torch.Tensor]) -> list[StoredTensor]:
        [(_, tensors)] = self.bundle.read_headers([self.entry.name])
        return [tensor for tensor in tensors.values() if tensor.name in contents]


def _read(read: FileRead, start: int, end: int) -> bytearray:
    """Bytes of the file that are no tensor in memory."""
    memory = bytearray(end - start)
    if memory:
        read.fill(start, memoryview(memory))
    return memory


def _new_bytes(byte_count: int) -> torch.Tensor:
    """New memory, of bytes."""
    if byte_count < _SMALL_BYTES:
        return torch.empty(byte_count, dtype=torch.uint8)
    return torch.frombuffer(new_memory(byte_count), dtype=torch.uint8)
