"""The weights of a stage: its session has its own copy, so they are read from the weight files when somebody asks for them."""

import contextlib
import mmap
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy

from stagepack.format.chunks import File, FileRead, read_chunks
from stagepack.format.codec import read_graph
from stagepack.format.file_checks import open_plain_file
from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.upgrade import is_newer_minor
from stagepack.format.weights import parse_weight_header
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_interpreter import read_weight, stored_tensors
from stagepack_loaders.weight_files import WeightFile


class StageWeights:
    """The weights of a stage as read-only arrays. They stay valid when the bundle is replaced or removed."""

    def __init__(
        self,
        bundle: Bundle,
        stage_number: int,
        graph_content: bytes,
        weight_files: Mapping[str, WeightFile],
        *,
        mapped: bool,
    ) -> None:
        self._graph_name = bundle.stages[stage_number].graph
        self._graph_content = graph_content
        self._newer = is_newer_minor(bundle.manifest.version)
        self._files = None if mapped else _OpenFiles(bundle, bundle.stages[stage_number].weights)
        # Of copies, the tensors that are kept.
        self._stored = stored_tensors(weight_files) if mapped else {}

    def keep(self, weight_names: Collection[str], weight_files: Mapping[str, WeightFile], *, verified: bool) -> None:
        """Keep some weights in memory of their own."""
        assert self._files is not None
        self._files.verify = verified
        if not weight_names:
            return
        kept_tensors = {
            weight.stored
            for weight in self._table
            if not weight.zeros and not set(weight_names).isdisjoint(weight.names)
        }
        for weight_file in weight_files.values():
            for stored_name in kept_tensors & weight_file.tensors.keys():
                stored = weight_file.tensors[stored_name]
                self._stored[stored_name] = numpy.frombuffer(
                    weight_file.content[stored.start : stored.end], numpy.uint8
                )

    def __iter__(self) -> Iterator[tuple[Weight, Array]]:
        """Yield each weight of the graph with its content at loading."""
        stored = self._stored if self._files is None else self._files.read()
        return ((weight, read_weight(weight, stored)) for weight in self._table)

    def some(self, weight_names: Collection[str]) -> Iterator[tuple[Weight, Array]]:
        """Yield some weights with their content at loading: of copies, those that are kept."""
        for weight in self._table:
            if weight.names[0] in weight_names:
                yield weight, read_weight(weight, self._stored)

    @cached_property
    def _table(self) -> tuple[Weight, ...]:
        return read_graph(self._graph_content, self._graph_name, newer=self._newer, module_calls=False).graph.weights


class _OpenFiles:
    """Weight files that stay open, and are read again when they are needed.

    Attributes:
        verify: compare what is read with the digests of the manifest. What was read at loading had these digests too.
    """

    def __init__(self, bundle: Bundle, file_names: Sequence[str]) -> None:
        self.verify = True
        self._reads: dict[str, tuple[File, int]] = {}
        open_files = contextlib.ExitStack()
        weakref.finalize(self, open_files.close)
        bundle.fetch(file_names)
        for file_name in file_names:
            entry = bundle.files[file_name]
            file = open_files.enter_context(open_plain_file(bundle.path, entry))
            self._reads[file_name] = entry, file.fileno()

    def read(self) -> dict[str, Array]:
        """Return the bytes of each stored tensor, by name, in new memory."""
        memories = {file_name: mmap.mmap(-1, entry.size) for file_name, (entry, _) in self._reads.items()}
        reads = [
            FileRead(entry, descriptor, memoryview(memories[file_name]))
            for file_name, (entry, descriptor) in self._reads.items()
        ]
        raise_problems(read_chunks(reads, compare=self.verify))
        stored_tensors: dict[str, Array] = {}
        for file_name, memory in memories.items():
            content = numpy.frombuffer(memory, numpy.uint8)
            content.flags.writeable = False
            for stored_name, stored in parse_weight_header(memory, file_name).items():
                stored_tensors[stored_name] = content[stored.start : stored.end]
        return stored_tensors
