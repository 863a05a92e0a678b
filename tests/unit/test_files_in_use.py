"""Weight files that are changed while they are mapped: loaded pipelines answer as before, and no process is killed.

The pipelines are in processes of their own: a file that was cut short under a mapping would end them by SIGBUS.
"""

import fcntl
import gc
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import DigestError
from stagepack_loaders import file_leases
from stagepack_loaders.base import Loading
from stagepack_loaders.file_leases import has_lease, map_with_lease, replace_by_copy, written_pages
from stagepack_loaders.torch.stage import TorchStage
from stagepack_loaders.weight_files import map_weight_file, open_weight_files
from tests.bundle_editor import BundleEditor, weight_file
from tests.hostile.test_opening import open_file_limit
from tests.modules import module_of
from tools.fork_server import FORK_SERVER

RUNTIMES = ("torch", "onnxruntime")
SIZE = 256
NAME = "stage-0.safetensors"
INPUT = torch.ones(1, SIZE)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with 512 KiB of weights and a buffer that calls write."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    model = module_of(lambda self, x: self.layers(x) + self.count.add_(1), layers=layers, count=torch.ones(()))
    path = tmp_path_factory.mktemp("files") / "m.stagepack"
    stagepack.export(model, (INPUT,), out=path, onnx=True)
    return path


@pytest.fixture
def bundle(original: Path) -> Iterator[Path]:
    """A copy of the bundle on tmpfs, whose files can have leases wherever the tests run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "m.stagepack"
        shutil.copytree(original, path)
        (path / NAME).chmod(0o644)
        yield path


@pytest.fixture(scope="module")
def answers(original: Path) -> Mapping[str, list[list[float]]]:
    """The answers of the first calls, by runtime."""
    pipelines = {runtime: stagepack.load(original, copy=True, runtime=runtime) for runtime in RUNTIMES}
    return {runtime: [pipeline(INPUT)[0].tolist() for _ in range(4)] for runtime, pipeline in pipelines.items()}


@pytest.fixture
def expected(answers: Mapping[str, list[list[float]]]) -> list[list[float]]:
    return answers["torch"]


def is_mapped(path: Path, process_id: int | None = None) -> bool:
    maps = Path(f"/proc/{process_id or os.getpid()}/maps").read_text()
    return f" {path.stat().st_ino} " in maps


def answer_calls(connection: Connection, path: Path, options: dict[str, Any]) -> None:
    """Load a bundle, and call the pipeline whenever the test asks for it."""
    torch.set_num_threads(1)
    pipeline = stagepack.load(path, **options)
    forks = False
    connection.send(os.getpid())
    while (request := connection.recv()) != "end":
        if request == "fork":
            # The child answers from now on, and the parent waits for it.
            forks = True
            if child := os.fork():
                _, status = os.waitpid(child, 0)
                assert status == 0, status
                pipeline(INPUT)
                return
            connection.send(os.getpid())
        else:
            connection.send(pipeline(INPUT)[0].tolist())
    if forks:
        os._exit(0)


class LoadedProcess:
    """A process that has loaded a bundle.

    Attributes:
        process_id: its number.
    """

    def __init__(self, path: Path, **options: object) -> None:
        self._connection, connection = FORK_SERVER.Pipe()
        self._process = FORK_SERVER.Process(target=answer_calls, args=(connection, path, options))
        self._process.start()
        # An error here if the process is killed, in the place of an endless wait.
        connection.close()
        self.process_id: int = self._connection.recv()

    def call(self) -> list[float]:
        self._connection.send("call")
        answer: list[float] = self._connection.recv()
        return answer

    def fork(self) -> None:
        self._connection.send("fork")
        self.process_id = self._connection.recv()

    def end(self) -> None:
        self._connection.send("end")
        self._process.join(60)
        assert self._process.exitcode == 0


def cut_short(path: Path) -> None:
    os.truncate(path, 4096)


def empty_by_writing(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def write_through_shared_map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[:] = os.urandom(len(shared))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.replace(path)


def remove(path: Path) -> None:
    path.unlink()


CHANGES = [cut_short, empty_by_writing, overwrite, write_through_shared_map, replace, remove]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_pipeline_answers_as_before_when_a_file_is_changed(
    change: Callable[[Path], None], runtime: str, bundle: Path, answers: Mapping[str, list[list[float]]]
) -> None:
    expected = answers[runtime]
    loaded = LoadedProcess(bundle, runtime=runtime)
    assert is_mapped(bundle / NAME, loaded.process_id)
    assert loaded.call() == expected[0]
    start = time.monotonic()
    change(bundle / NAME)
    assert time.monotonic() - start < 20  # the kernel would make a writer wait 45 s
    assert [loaded.call(), loaded.call()] == expected[1:3]
    loaded.end()


@pytest.mark.parametrize("change", [cut_short, overwrite])
def test_a_forked_process_keeps_its_weights_too(
    change: Callable[[Path], None], bundle: Path, expected: list[list[float]]
) -> None:
    loaded = LoadedProcess(bundle)
    loaded.fork()
    assert is_mapped(bundle / NAME, loaded.process_id)
    change(bundle / NAME)
    assert not is_mapped(bundle / NAME, loaded.process_id)
    assert [loaded.call(), loaded.call()] == expected[:2]
    loaded.end()


def test_each_process_that_maps_a_file_keeps_its_weights(bundle: Path, expected: list[list[float]]) -> None:
    first, second = LoadedProcess(bundle), LoadedProcess(bundle)
    cut_short(bundle / NAME)
    assert first.call() == second.call() == expected[0]
    first.end()
    second.end()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_file_that_is_open_for_writing_is_copied(
    runtime: str, bundle: Path, answers: Mapping[str, list[list[float]]]
) -> None:
    expected = answers[runtime]
    with (bundle / NAME).open("r+b") as writer:
        loaded = LoadedProcess(bundle, runtime=runtime)
        assert not is_mapped(bundle / NAME, loaded.process_id)
        writer.truncate(4096)
        assert loaded.call() == expected[0]
        loaded.end()


def test_calls_during_the_change_are_right(bundle: Path, expected: list[list[float]]) -> None:
    pipeline = stagepack.load(bundle)
    writer = threading.Thread(target=overwrite, args=(bundle / NAME,))
    answers = [pipeline(INPUT)[0].tolist()]
    writer.start()
    while writer.is_alive():
        pipeline.reset_state()
        answers.append(pipeline(INPUT)[0].tolist())
    writer.join()
    assert all(answer == expected[0] for answer in answers)


def test_what_was_written_into_weights_stays_and_the_file_is_not_written(bundle: Path) -> None:
    before = (bundle / NAME).read_bytes()
    stage = stagepack.load_stage(bundle, 0)
    weight = next(stage.parameters())
    with torch.no_grad():
        weight[0, :3] = 7
        changed = weight.clone()
    address = weight.data_ptr()
    with (bundle / NAME).open("r+b") as file:
        assert file.read() == before
        assert not is_mapped(bundle / NAME)
        file.truncate(0)
    assert weight.data_ptr() == address
    assert torch.equal(weight, changed)


def test_memory_that_took_the_place_of_a_mapping_counts_as_written(bundle: Path) -> None:
    content = map_weight_file(bundle / NAME).content
    elements = numpy.frombuffer(content, numpy.uint8)
    assert int(elements.sum()) > 0  # reads all pages
    address, page_count = elements.ctypes.data, -(-len(elements) // mmap.PAGESIZE)
    assert not written_pages(address, len(elements)).any()
    elements[mmap.PAGESIZE] += 1
    assert written_pages(address, len(elements)).tolist() == [index == 1 for index in range(page_count)]
    copy = elements.copy()
    cut_short(bundle / NAME)
    assert written_pages(address, len(elements)).all()
    assert (elements == copy).all()


@pytest.mark.parametrize("change", [overwrite, cut_short])
def test_weights_that_pass_through_the_memory_of_a_device_come_from_the_copy(
    change: Callable[[Path], None], bundle: Path, expected: list[list[float]]
) -> None:
    with torch.no_grad():
        pipeline = stagepack.load(bundle, device_memory=300 * 1024)
        stage = pipeline.stages[0]
        assert isinstance(stage, TorchStage)
        assert stage.residency is not None
        assert stage.residency.streamed_bytes
        change(bundle / NAME)
        assert [pipeline(INPUT)[0].tolist() for _ in range(3)] == expected[:3]


def test_files_without_a_lease_are_copied_and_compared(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = open_weight_files(stagepack.open(bundle), [NAME], Loading(), verify=True)[NAME].content
    assert has_lease(content)
    monkeypatch.setattr(file_leases, "_FILE_SYSTEMS", frozenset())
    copied = open_weight_files(stagepack.open(bundle), [NAME], Loading(), verify=True)[NAME].content
    assert not has_lease(copied)
    assert map_weight_file(bundle / NAME).content[:] == copied[:] == content[:]
    editor = BundleEditor.copy(bundle, tmp_path / "damaged")
    editor.flip_bit(NAME, 5000)
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: the content was changed"):
        open_weight_files(stagepack.open(editor.path), [NAME], Loading(), verify=True)


def test_files_are_copied_when_no_descriptor_is_left_for_a_lease(bundle: Path) -> None:
    editor = BundleEditor.copy(bundle, bundle.parent / "many.stagepack")
    names = [f"more-{number}.safetensors" for number in range(40)]
    for name in names:
        editor.write_file(name, weight_file(b"{}", b""))
    opened = stagepack.open(editor.path)
    with open_file_limit(60):
        files = open_weight_files(opened, names, Loading(), verify=True)
    assert files.keys() == set(names)
    assert 0 < sum(has_lease(file.content) for file in files.values()) < 40


def test_a_file_that_is_changed_while_it_is_compared_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = open_weight_files.__globals__["_compare_mapped"]

    def compare_and_change(*arguments: Any) -> Any:
        problems = compare(*arguments)
        overwrite(bundle / NAME)
        return problems

    monkeypatch.setitem(open_weight_files.__globals__, "_compare_mapped", compare_and_change)
    with pytest.raises(DigestError, match="changed while it was loaded"):
        stagepack.load(bundle)


def test_a_lease_that_ends_too_early_is_a_typed_error_until_the_bundle_is_loaded_again(
    bundle: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a lease after 45 s, for example while the process is stopped."""

    def end_first(memory: mmap.mmap, descriptor: int) -> None:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        replace_by_copy(memory, descriptor)

    monkeypatch.setattr(file_leases, "replace_by_copy", end_first)
    pipeline = stagepack.load(bundle)
    overwrite(bundle / NAME)
    deadline = time.monotonic() + 20
    while not file_leases._lost and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: the file was changed while it was in use"):
        pipeline(INPUT)
    del pipeline
    gc.collect()
    stagepack.load(original)(INPUT)


def test_a_lease_ends_with_its_mapping_and_costs_little(bundle: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    seconds = []
    for _ in range(20):
        with (bundle / NAME).open("rb") as file:
            start = time.perf_counter()
            memory = map_with_lease(file.fileno(), NAME)
            seconds.append(time.perf_counter() - start)
        assert memory is not None
        assert has_lease(memory)
        del memory
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert min(seconds) < 0.005
    descriptor = os.open(bundle / NAME, os.O_RDWR | os.O_NONBLOCK)  # an error while somebody has a lease
    os.close(descriptor)
