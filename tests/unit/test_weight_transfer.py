"""Weight files that threads bring into memory by a ring of blocks, from which a device copies when it has time."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from blake3 import blake3

import stagepack
from stagepack.errors import DigestError
from stagepack.format.chunks import CHUNK_BYTES
from stagepack.format.reader import Bundle
from stagepack_loaders.torch import weight_transfer
from stagepack_loaders.torch.weight_transfer import ArrivingFile, ArrivingFiles, BlockRing, ByteRange, Transfers
from stagepack_loaders.weight_files import FolderReader
from tests.bundle_editor import BundleEditor

CPU = torch.device("cpu")
NAME = "stage-0.safetensors"


class LateCopies:
    """A device that copies later, in the order in which it was told to, as the stream of a GPU does.

    Attributes:
        block_count: how many blocks were made.
        may_copy: whether the device works.
    """

    block_bytes = 2**16

    def __init__(self) -> None:
        self.block_count = 0
        self.may_copy = threading.Event()
        self.may_copy.set()
        self._lock = threading.Lock()
        self._copies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            assert self.may_copy.wait(60)
            copy()

    def end(self) -> None:
        self.may_copy.set()
        self._copies.put(None)
        self._thread.join()

    def new_block(self) -> torch.Tensor:
        with self._lock:
            self.block_count += 1
        return torch.full((self.block_bytes,), 0xEE, dtype=torch.uint8)

    def copy(self, block: torch.Tensor, memory: torch.Tensor, after: Any) -> "LateEvent":
        copied = LateEvent()

        def work() -> None:
            numpy.copyto(memory.numpy(), block[: len(memory)].numpy())
            copied.set()

        self._copies.put(work)
        return copied


class LateEvent(threading.Event):
    """An event with the method of those of torch."""

    def synchronize(self) -> None:
        assert self.wait(60)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    """The device that weights arrive at."""
    late = LateCopies()
    monkeypatch.setattr(weight_transfer, "CachedCopies", lambda: late)
    monkeypatch.setattr(weight_transfer, "usable_cpu_count", lambda: 4)
    yield late
    late.end()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose weight file has three chunks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(5)))
    return stagepack.export(model, (torch.ones(1, 1500),), out=tmp_path_factory.mktemp("transfer") / "m", stages=1)


def _arriving(bundle: Bundle, read_into: Any = None) -> tuple[ArrivingFiles, ArrivingFile]:
    """The weight file on its way. It arrives as long as the first object is there."""
    files = ArrivingFiles(bundle, CPU, read_into or FolderReader(bundle.path).read_into, verify=True)
    return files, files.add([NAME])[NAME]


def test_a_file_arrives_by_few_blocks(bundle: Bundle, copies: LateCopies) -> None:
    content = (bundle.path / NAME).read_bytes()
    assert 2 * CHUNK_BYTES < len(content) <= 3 * CHUNK_BYTES
    _files, file = _arriving(bundle)
    file.wait()
    assert file.memory.numpy().tobytes() == content
    # As many as threads, and two for the device.
    assert copies.block_count <= 4 + 2


def test_threads_wait_for_the_device_and_memory_stays_bounded(bundle: Bundle, copies: LateCopies) -> None:
    copies.may_copy.clear()
    counted = threading.Semaphore(0)
    reader = FolderReader(bundle.path)

    def read_into(file_name: str, start: int, memory: memoryview) -> None:
        reader.read_into(file_name, start, memory)
        counted.release()

    _files, file = _arriving(bundle, read_into)
    for _ in range(6):
        assert counted.acquire(timeout=60)
    assert not counted.acquire(timeout=0.2), "a block was filled before its copy was made"
    assert copies.block_count == 6
    assert not file.has_arrived()
    copies.may_copy.set()
    file.wait()
    assert file.memory.numpy().tobytes() == (bundle.path / NAME).read_bytes()


def test_drawn_ranges_arrive_at_their_place(tmp_path: Path, copies: LateCopies) -> None:
    draw = numpy.random.default_rng(0)
    content = draw.bytes(2**21)
    (tmp_path / "weights").write_bytes(content)
    transfers = Transfers(CPU, FolderReader(tmp_path).read_into)
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(50):
        memory, expected = numpy.zeros(2**21, numpy.uint8), bytearray(2**21)
        positions = sorted(map(int, draw.choice(2**21, 20, replace=False)))
        hashers = {(start, end): blake3() for start, end in zip(positions[::2], positions[1::2], strict=True)}
        for (start, end), hasher in hashers.items():
            part = torch.from_numpy(memory[start:end])
            transfers.submit(
                ByteRange("weights", start, end), part, None, lambda *arrival: arrived.put(arrival), hasher
            )
            expected[start:end] = content[start:end]
        for _ in hashers:
            event, error = arrived.get(timeout=60)
            assert error is None
            event.synchronize()
        assert memory.tobytes() == expected
        assert all(hasher.digest() == blake3(content[slice(*part)]).digest() for part, hasher in hashers.items())
    assert copies.block_count <= 6


def test_a_wrong_digest_in_the_last_chunk_gives_no_value_of_it(
    bundle: Bundle, copies: LateCopies, tmp_path: Path
) -> None:
    editor = BundleEditor.copy(bundle.path, tmp_path / "m")
    size = bundle.files[NAME].size
    editor.flip_bit(NAME, size - 1)
    _files, file = _arriving(stagepack.open(editor.path))
    for start, end in ((2 * CHUNK_BYTES, size), (0, size), (size - 4, size)):
        with pytest.raises(DigestError, match="expected blake3"):
            file.wait(start, end)
    file.wait(0, 2 * CHUNK_BYTES)
    assert not file.has_arrived()
    with torch.no_grad(), pytest.raises(DigestError, match="expected blake3"):
        stagepack.load(editor.path, stream=True)(torch.ones(1, 1500))


@pytest.mark.parametrize("what", ["read", "new_block", "copy"])
def test_a_thread_that_fails_fails_its_chunk_and_nothing_else(
    bundle: Bundle, copies: LateCopies, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FolderReader(bundle.path)
    calls = iter(range(10**6))

    def failing(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(calls) == 3:
                raise RuntimeError("out of memory")
            return function(*arguments)

        return call

    read_into = failing(reader.read_into) if what == "read" else reader.read_into
    if what != "read":
        monkeypatch.setattr(copies, what, failing(getattr(copies, what)))
    _files, file = _arriving(bundle, read_into)
    content = (bundle.path / NAME).read_bytes()
    arrived_chunks = 0
    for start in range(0, len(content), CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, len(content))
        with contextlib.suppress(DigestError):
            file.wait(start, end)
            assert file.memory[start:end].numpy().tobytes() == content[start:end]
            arrived_chunks += 1
    assert arrived_chunks == 2
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: the file cannot be loaded: out of memory"):
        file.wait()


def test_a_ring_has_all_its_blocks_after_errors() -> None:
    """Otherwise threads would wait for ever."""
    copies = LateCopies()
    ring = BlockRing(copies, 2)

    def fail(start: int, memory: memoryview) -> None:
        raise OSError("no disk")

    def fill(start: int, memory: memoryview) -> None:
        memory[:] = bytes([start % 251]) * len(memory)

    memory = torch.zeros(3 * copies.block_bytes, dtype=torch.uint8)
    for _ in range(10):
        with pytest.raises(OSError, match="no disk"):
            ring.write(fail, 0, memory, None, None)
        ring.write(fill, 7, memory, None, None).synchronize()
        assert memory[0] == 7
    assert copies.block_count == 2
    copies.end()
