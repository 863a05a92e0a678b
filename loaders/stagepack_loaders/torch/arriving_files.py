"""Weight files that threads read into the memory of a device, in order, while the stages run already."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from blake3 import blake3

from stagepack.errors import DigestError, Problem, StagepackError, repeated_error
from stagepack.format.chunks import ByteProgress, FileChunk, file_chunks
from stagepack.format.manifest import File
from stagepack_loaders.torch.weight_transfer import ByteRange, DeviceWriter, TransferThreads, current_event, empty_bytes
from stagepack_loaders.weight_files import WeightReader


class ArrivingFile:
    """A weight file in the memory of a device. Its chunks arrive in any order.

    Attributes:
        entry: the manifest entry of the file.
        memory: the bytes of the file; those of chunks that have not arrived are undefined.
    """

    def __init__(self, entry: File, device: torch.device) -> None:
        self.entry = entry
        self.memory = empty_bytes(entry.size, device)
        self._allocated = current_event(device)
        self.chunks = file_chunks(entry)
        self._tensor_bytes: dict[tuple[int, int], torch.Tensor] = {}
        self._arrival = threading.Condition()
        self._events: dict[int, Any] = {}
        self._errors: dict[int, StagepackError] = {}

    def tensor_bytes(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes of a stored tensor, as a tensor with a storage of its own, which shares the memory.

        Buffers that calls write are copied and exchanged by storage.
        """
        if (start, end) not in self._tensor_bytes:
            offset = self.memory.storage_offset()
            storage = self.memory.untyped_storage()[offset + start : offset + end]
            self._tensor_bytes[start, end] = torch.empty(0, dtype=torch.uint8, device=self.memory.device).set_(storage)
        return self._tensor_bytes[start, end]

    def write_chunk(
        self,
        writer: DeviceWriter,
        chunk: FileChunk,
        *,
        verify: bool,
        progress: ByteProgress | None,
        on_damage: Callable[[File], None],
    ) -> None:
        """Read a chunk into the memory. Errors are raised by `wait`.

        writer: writes the bytes.
        progress: called with the number of bytes that were read.
        """
        hasher = blake3() if verify else None
        source = ByteRange(self.entry.name, chunk.start, chunk.end)
        event: Any = None
        error: StagepackError | None = None
        try:
            event = writer.write(source, self.memory[chunk.start : chunk.end], hasher, self._allocated)
            problem = None if hasher is None else chunk.problem(hasher.hexdigest())
            if problem is not None:
                error = DigestError([problem])
                on_damage(self.entry)
        except StagepackError as read_error:
            error = read_error
        except Exception as unexpected_error:  # noqa: BLE001 - the thread would end, and a call would wait for ever
            message = f"the file cannot be loaded: {unexpected_error}"
            error = DigestError([Problem(rule="D1", where=self.entry.name, message=message)])
        if progress is not None:
            progress(chunk.end - chunk.start)
        with self._arrival:
            if error is None:
                self._events[chunk.index] = event
            else:
                self._errors[chunk.index] = error
            self._arrival.notify_all()

    def wait(self, start: int, end: int) -> None:
        """Return when a range of bytes has arrived."""
        for chunk in file_chunks(self.entry, start, end) if end > start else ():
            with self._arrival:
                self._arrival.wait_for(lambda index=chunk.index: index in self._events or index in self._errors)  # type: ignore[misc]
                if chunk.index in self._errors:
                    raise repeated_error(self._errors[chunk.index])
                event = self._events[chunk.index]
            # Not the current stream alone: later calls may be made on others.
            if event is not None:
                event.synchronize()

    def has_arrived(self) -> bool:
        """Whether all chunks have arrived, without an error."""
        return len(self._events) == len(self.chunks)


class ArrivingFiles:
    """The weight files of stages on one device. Threads read them in the order in which they are added.

    The threads end when the object is gone: keep it as long as files are to arrive.
    """

    def __init__(
        self,
        device: torch.device,
        reader: WeightReader,
        *,
        verify: bool,
        progress: ByteProgress | None = None,
        is_staged: bool | None = None,
        on_damage: Callable[[File], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._on_damage = on_damage
        self._progress = progress
        self._writer = DeviceWriter(device, reader, is_staged=is_staged)
        self._verify = verify
        self._threads = TransferThreads()
        self._files: dict[str, ArrivingFile] = {}

    def add(self, entries: Iterable[File]) -> dict[str, ArrivingFile]:
        """Return files, which are read from now on."""
        files = {}
        for entry in entries:
            if entry.name not in self._files:
                file = self._files[entry.name] = ArrivingFile(entry, self._device)
                for chunk in file.chunks:
                    self._threads.submit(
                        partial(
                            file.write_chunk,
                            self._writer,
                            chunk,
                            verify=self._verify,
                            progress=self._progress,
                            on_damage=self._on_damage,
                        )
                    )
            files[entry.name] = self._files[entry.name]
        return files
