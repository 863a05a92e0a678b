"""A weight file of a new version, made by deltas from the running one: changed in memory, and compared with its digests by chunk."""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy
import torch
from blake3 import blake3

from stagepack.deltas.document import BLOCK_BYTES
from stagepack.errors import Problem
from stagepack.format.chunk_reads import FileRead, Fill
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.file_source import FilePatch
from stagepack.format.reader import Bundle
from stagepack.format.threads import map_in_threads
from stagepack.format.weights import StoredTensor
from stagepack_loaders.elements import Array
from stagepack_loaders.file_leases import new_memory
from stagepack_loaders.weight_changes import WeightChanges

# Larger tensors have memory of their own, which is freed with them; neighbours below are changed together, as a delta stores them.
_SMALL_BYTES: Final = 64 * 1024
_TOGETHER_BYTES: Final = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Bytes of a weight file in memory.

    Attributes:
        start: the position of the first one in the file.
        octets: the bytes.
        fill: fills a part of them, from a position of the file on; None if they are there.
    """

    start: int
    octets: Array
    fill: Fill | None = None

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.octets)

    def blocks(self, start: int, end: int) -> Iterator[Array]:
        """Yield the bytes of a range, each block while it is in the cache of the core; no part of a delta crosses a block."""
        while start < end:
            block_end = min(end, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
            block = self.octets[start - self.start : block_end - self.start]
            if self.fill is not None:
                self.fill(start, block.data)
            yield block
            start = block_end


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

        Each block is copied, changed and hashed in one go, in the cache of a core. For 1 GB of bfloat16, of which 1 % of the elements
        differ, the new pages and the copy take 0.38 s of a processor, the changes 0.12 s, and the digests 0.12 s.

        verify: compare the chunks that change with their digests, over what is in memory.
        """
        runs = list(self._runs())
        memories = [_new_bytes(run[-1].end - run[0].start) for run in runs]
        with contextlib.ExitStack() as open_files:
            read = self.bundle.open_read(open_files, self.entry.name)
            contents = [
                _Content(start=run[0].start, octets=memory.numpy(), fill=self._fill_of(run, read))
                for run, memory in zip(runs, memories, strict=True)
            ]
            contents = sorted([*contents, *self._known()], key=lambda content: (content.start, content.end))
            ends = [content.end for content in contents]

            def is_right(chunk: FileChunk) -> bool:
                begun = itertools.islice(contents, bisect.bisect_right(ends, chunk.start), None)
                is_compared = verify and self._changes_in(chunk)
                return self._make_chunk(
                    chunk,
                    itertools.takewhile(lambda content: content.start < chunk.end, begun),
                    read if is_compared else None,
                )

            has_problem = not all(map_in_threads(is_right, file_chunks(self.entry)))
        message = "the weights that run, with the changes of the delta, are not those of the result: load its bundle"
        problems = [Problem(rule="D2", where=self.entry.name, message=message)] if has_problem else []
        return dict(_tensors(runs, memories)), problems

    def _make_chunk(self, chunk: FileChunk, contents: Iterator[_Content], read: FileRead | None) -> bool:
        """Fill the contents of a chunk, and return whether it is right.

        read: reads what is no content, to compare the digest of the chunk; None not to compare it.
        """
        hasher, position = blake3(), chunk.start
        for content in contents:
            first, last = max(content.start, chunk.start), min(content.end, chunk.end)
            if read is not None:
                hasher.update(_read(read, position, first))
            elif content.fill is None:
                continue
            for block in content.blocks(first, last):
                if read is not None:
                    hasher.update(block.data)
            position = last
        if read is None:
            return True
        hasher.update(_read(read, position, chunk.end))
        return hasher.hexdigest() == chunk.digest

    def _changes_in(self, chunk: FileChunk) -> bool:
        return self.changes.changes_range(self.entry.name, chunk.start, chunk.end)

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

    def _fill_of(self, run: Sequence[StoredTensor], read: FileRead) -> Callable[[int, memoryview], None]:
        """What fills memory with bytes of a run: from the tensors that run, or, if one is not as the file has it, from the file."""
        if not all(tensor.name in self.running for tensor in run):
            return read.fill
        sources = [(tensor.start, tensor.end, self.running[tensor.name].numpy()) for tensor in run]

        def fill(start: int, memory: memoryview) -> None:
            octets, end = numpy.frombuffer(memory, numpy.uint8), start + len(memory)
            for tensor_start, tensor_end, source in sources:
                first, last = max(start, tensor_start), min(end, tensor_end)
                if first < last:
                    octets[first - start : last - start] = source[first - tensor_start : last - tensor_start]
            self.patch.apply(start, memory)

        return fill

    def _known(self) -> Iterator[_Content]:
        """The tensors of the file that are in memory and need not be made."""
        needed, known = {tensor.name for tensor in self.needed}, {**self.running, **self.composed}
        [(_, tensors)] = self.bundle.read_headers([self.entry.name])
        for tensor in tensors.values():
            if tensor.name in known and tensor.name not in needed and tensor.end > tensor.start:
                yield _Content(start=tensor.start, octets=known[tensor.name].numpy())


def _tensors(
    runs: Sequence[Sequence[StoredTensor]], memories: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the bytes of each tensor of runs. Small ones have memory of their own, too."""
    for run, memory in zip(runs, memories, strict=True):
        for tensor in run:
            octets = memory[tensor.start - run[0].start : tensor.end - run[0].start]
            yield tensor.name, memory if len(run) == 1 else octets.clone()


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
