"""Weights that several processes train -> the changed files of the next version of a bundle: each process writes those of its weights.

No process has the weights of another one. A weight file is written by the process that has most of its tensors. In a bundle that is cut as
the trained one, this process has all of them; otherwise the others lend it what it lacks, by files in the folder that is written.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from stagepack.capture.checkpoint import read_checkpoint
from stagepack.capture.module_checkpoint import shown
from stagepack.deltas.document import ChangedFile
from stagepack.deltas.encoding import EncodedFile, data_file_name
from stagepack.errors import CaptureError, UnchangedError
from stagepack.format.chunks import File
from stagepack.format.file_writing import synchronize, write_pieces
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter
from stagepack.roads.distributed_weights import DistributedWeights, in_all_processes, weight_names, write_weights
from stagepack.roads.replace import Replacements, find_replacements
from stagepack.roads.weights_delta import check_zeros, file_versions, next_files, next_manifest, weight_file_names

_LENT_NAME: Final = "lent.safetensors"


class _WrittenFile(msgspec.Struct):
    """What a process has written of a weight file: its entry in the next version, what changes in it, and the entry of the data file."""

    entry: File
    changed: ChangedFile
    data: File


def write_training_changes(
    bundle: Bundle,
    training: DistributedWeights,
    open_writer: Callable[[], BundleWriter],
    finish: Callable[[BundleWriter, bytes, Sequence[ChangedFile]], None],
) -> None:
    """Write the data files in all processes; process 0 then finishes the delta.

    open_writer: begins the delta, in process 0.
    finish: puts the delta in place, given the manifest of the next version and the changed files.
    """
    with contextlib.ExitStack() as stack:
        writers: list[BundleWriter] = []

        def begin() -> str:
            if training.rank:
                return ""
            writers.append(stack.enter_context(open_writer()))
            return str(writers[0].folder.parent)

        folder = Path(in_all_processes(training, begin)[0])
        own = _OwnChanges(bundle, training, folder)
        names = [set(msgspec.json.decode(text)) for text in in_all_processes(training, own.find)]
        in_all_processes(training, lambda: own.lend(names))
        texts = in_all_processes(training, lambda: own.write(names))

        def put_in_place() -> str:
            try:
                if writers:
                    finish(writers[0], *_collect(bundle, writers[0], folder, texts))
            except UnchangedError as error:
                return str(error)
            return ""

        if unchanged := in_all_processes(training, put_in_place)[0]:
            raise UnchangedError(unchanged)


def writer_of_files(tensors_of_file: Mapping[str, Collection[str]], names: Sequence[Collection[str]]) -> dict[str, int]:
    """Return the process that writes each weight file: the first of those that have most of its tensors.

    names: the stored tensors that each process has.
    """
    return {
        file_name: max(range(len(names)), key=lambda rank: len(set(tensors).intersection(names[rank])))
        for file_name, tensors in tensors_of_file.items()
    }


class _OwnChanges:
    """What one process writes of the next version, step by step; the other processes do the same step meanwhile."""

    def __init__(self, bundle: Bundle, training: DistributedWeights, folder: Path) -> None:
        self._bundle = bundle
        self._training = training
        self._folders = [folder / f"process-{rank}" for rank in range(training.process_count)]
        self._found: Replacements | None = None

    @cached_property
    def _tensors_of_file(self) -> dict[str, list[str]]:
        headers = self._bundle.read_headers(sorted(weight_file_names(self._bundle)))
        return {file_name: list(tensors) for file_name, tensors in headers}

    @property
    def _own(self) -> Replacements:
        assert self._found is not None
        return self._found

    def find(self) -> str:
        """Find the weights of this process in the bundle; return the names of their stored tensors."""
        self._folders[self._training.rank].mkdir()
        self._found = find_replacements(self._bundle, dict(self._training.own_weights()), needed_names=())
        check_zeros(self._found)
        return msgspec.json.encode(list(self._found.replacements)).decode()

    def lend(self, names: Sequence[Collection[str]]) -> str:
        """Write the tensors that another process needs, and only this one has, or has first."""
        self._check_complete(names)
        rank = self._training.rank
        lent = [
            name
            for file_name, writer in writer_of_files(self._tensors_of_file, names).items()
            for name in self._tensors_of_file[file_name]
            if name in names[rank]
            and name not in names[writer]
            and not any(name in earlier for earlier in names[:rank])
        ]
        if lent:
            tensors = ((name, self._own.replacements[name].read()) for name in lent)
            write_weights(tensors, self._folders[rank] / _LENT_NAME)
        return ""

    def _check_complete(self, names: Sequence[Collection[str]]) -> None:
        """Refuse a bundle that has other weights than the one that is trained."""
        known = set().union(*names)
        unknown = [
            weight
            for weight in self._own.weights.values()
            if weight.kind in ("parameter", "buffer") and weight.stored not in known
        ]
        # A delta is written at each step: graphs are read only if weights are missing, which other entry points may have.
        needed_names = weight_names(self._training.bundle) if unknown else set()
        missing = [weight.names[0] for weight in unknown if not needed_names.isdisjoint(weight.names)]
        if missing:
            raise CaptureError(
                f"no process has the weights {shown(missing)} of the bundle: give the one that is trained"
            )

    def write(self, names: Sequence[Collection[str]]) -> str:
        """Write the data files of the weight files of this process; return what it has written."""
        lent = {
            name: tensor
            for path in (folder / _LENT_NAME for folder in self._folders)
            if path.exists()
            for name, tensor in read_checkpoint(path).items()
        }
        own = self._own
        rank, writers = self._training.rank, writer_of_files(self._tensors_of_file, names)
        # A tensor that this process has itself is not lent to it.
        found = Replacements(
            source_name=own.source_name,
            weights=own.weights,
            replacements={**lent, **own.replacements},
            files=own.files,
            version=own.version,
        )
        written: list[_WrittenFile] = []
        for number, entry in enumerate(next_files(self._bundle)):
            if writers.get(entry.name) != rank:
                continue
            path = self._folders[rank] / str(number)
            with contextlib.ExitStack() as open_files:
                versions = file_versions(self._bundle, entry, found, open_files)
                assert versions is not None
                encoded = EncodedFile(versions)
                data = write_pieces(path, encoded.frames())
            if encoded.entry != entry:
                synchronize(path)
                written.append(_WrittenFile(encoded.entry, encoded.changed_file(path.name), data))
        return msgspec.json.encode(written).decode()


def _collect(
    bundle: Bundle, writer: BundleWriter, folder: Path, texts: Sequence[str]
) -> tuple[bytes, list[ChangedFile]]:
    """Put what all processes have written into the delta; return the manifest of the next version and the changed files."""
    written = {
        file.entry.name: (file, folder / f"process-{rank}" / file.data.name)
        for rank, text in enumerate(texts)
        for file in msgspec.json.decode(text, type=list[_WrittenFile])
    }
    changed: list[ChangedFile] = []
    entries: list[File] = []
    for entry in next_files(bundle):
        if entry.name not in written:
            entries.append(entry)
            continue
        file, path = written[entry.name]
        data_name = data_file_name(entry.name, len(changed))
        writer.link_file(path, msgspec.structs.replace(file.data, name=data_name))
        changed.append(msgspec.structs.replace(file.changed, data=data_name))
        entries.append(file.entry)
    return next_manifest(bundle, entries), changed
