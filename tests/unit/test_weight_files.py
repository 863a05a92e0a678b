"""Weights on the CPU: mapped by default, copied on request. `tests/serve/test_served_bundles.py` changes files that are mapped."""

import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import DigestError
from stagepack.format.chunk_reads import FileRead, read_chunks
from stagepack.format.reader import Bundle
from stagepack_loaders import weight_files
from stagepack_loaders.base import Loading
from stagepack_loaders.file_leases import map_file, populate
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.weight_files import map_weight_file, open_weight_files
from tests.bundle_editor import BundleEditor
from tools.fork_server import run_forked
from tools.measuring import memory_of_status

SIZE = 1024
NAME = "stage-0.safetensors"

# Loads copies of all stages of a bundle in a runtime, empties their files, and replays the example. A stage with state begins anew.
CUT_EXAMPLE_SHORT = """
import os, sys
import stagepack
from stagepack_loaders.example import replay_example
bundle = stagepack.open(sys.argv[1])
pipeline = stagepack.load(bundle, runtime=sys.argv[2], copy=True)
for stage in bundle.stages:
    for name in (*stage.weights, *stage.onnx.weights):
        os.truncate(bundle.path / name, 0)
for _ in range(2):
    assert replay_example(pipeline).largest == 0.0
    pipeline.reset_state()
"""
TOWER = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with 8 MiB of weights."""
    path = tmp_path_factory.mktemp("weights") / "linear.stagepack"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    stagepack.export(model, (torch.ones(1, SIZE),), out=path)
    return path


@pytest.mark.process
@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_copy_in_any_runtime_needs_no_file(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "m.stagepack"
    shutil.copytree(TOWER, path)
    (script := tmp_path / "script.py").write_text(CUT_EXAMPLE_SHORT)
    found = run_forked(str(path), runtime, script=script)
    assert found.returncode == 0, (found.returncode, found.stderr)


def test_copies_and_maps_hold_the_same_bytes_and_neither_writes_to_the_file(linear: Path) -> None:
    bundle = stagepack.open(linear)
    before = (linear / NAME).read_bytes()
    for copy in (False, True):
        file = open_weight_files(bundle, [NAME], Loading(options=LoadOptions(copy=copy)), verify=True)[NAME]
        assert file.content[:] == before
        stage = stagepack.load_stage(linear, 0, copy=copy)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.zero_()
    assert (linear / NAME).read_bytes() == before
    bundle.verify()


@pytest.fixture
def mapped(linear: Path) -> Iterator[Bundle]:
    """The bundle on tmpfs, where its files can have leases."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield stagepack.open(shutil.copytree(linear, Path(folder) / "m.stagepack"))


def test_verified_weights_are_ready_for_their_first_use_without_memory_of_their_own(mapped: Bundle) -> None:
    memory_before = memory_of_status("RssAnon")
    content = open_weight_files(mapped, [NAME], Loading(), verify=True)[NAME].content
    assert memory_of_status("RssAnon") - memory_before < len(content) / 4
    assert _page_faults_of(content) < 16 < _page_faults_of(map_weight_file(mapped.path / NAME).content)


def _page_faults_of(content: mmap.mmap) -> int:
    """How many page faults the first use of memory takes."""
    elements = numpy.frombuffer(content, numpy.uint8)
    faults_before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    elements[:: mmap.PAGESIZE].max()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults_before


@pytest.mark.parametrize("size", [1, 4095, 4096, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**21 + 7])
def test_a_mapping_has_the_bytes_of_its_file_and_no_others(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        memory = map_file(file.fileno())
    assert len(memory) == size
    assert memory[:] == content


@pytest.mark.parametrize("is_old", [False, True])
def test_bytes_that_are_mapped_are_compared_on_any_kernel(
    mapped: Bundle, tmp_path: Path, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "can_populate", lambda: not is_old)
    open_weight_files(mapped, [NAME], Loading(), verify=True)
    editor = BundleEditor(mapped.path)
    for position in (0, 5_000_000, mapped.files[NAME].size - 1):
        editor.flip_bit(NAME, position)
        with pytest.raises(DigestError, match=r"stage-0\.safetensors: the content was changed"):
            open_weight_files(mapped, [NAME], Loading(), verify=True)
        editor.flip_bit(NAME, position)
    open_weight_files(mapped, [NAME], Loading(), verify=True)


def test_the_bytes_of_the_mapping_are_the_ones_that_are_compared(
    mapped: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def populate_and_write(content: mmap.mmap, start: int, byte_count: int) -> None:
        populate(content, start, byte_count)
        content[start + byte_count - 1] ^= 1

    monkeypatch.setattr(weight_files, "populate", populate_and_write)
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: the content was changed"):
        open_weight_files(mapped, [NAME], Loading(), verify=True)


def test_a_file_that_is_cut_short_without_a_word_to_its_lease_is_an_error(
    mapped: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An access to the memory would end the process."""

    def cut_and_populate(content: mmap.mmap, start: int, byte_count: int) -> None:
        os.close(os.open(mapped.path / NAME, os.O_RDONLY | os.O_TRUNC))
        populate(content, start, byte_count)

    monkeypatch.setattr(weight_files, "populate", cut_and_populate)
    with pytest.raises(DigestError, match=r"stage-0\.safetensors: the file cannot be read: it was cut short"):
        open_weight_files(mapped, [NAME], Loading(), verify=True)


def test_a_copy_is_not_used_if_a_chunk_is_wrong(linear: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(linear, tmp_path / "m.stagepack")
    editor.flip_bit(NAME, 5_000_000)
    bundle = stagepack.open(editor.path)
    for copy in (False, True):
        with pytest.raises(DigestError, match=r"stage-0\.safetensors: the content was changed"):
            open_weight_files(bundle, [NAME], Loading(options=LoadOptions(copy=copy)), verify=True)
        open_weight_files(bundle, [NAME], Loading(options=LoadOptions(copy=copy)), verify=False)


def test_progress_counts_the_bytes_that_are_read(linear: Path) -> None:
    bundle = stagepack.open(linear)
    counts: list[int] = []
    open_weight_files(bundle, [NAME], Loading(options=LoadOptions(copy=True), progress=counts.append), verify=True)
    assert sum(counts) == bundle.files[NAME].size
    bundle.verify(counts.append)
    assert sum(counts) > 2 * bundle.files[NAME].size


@pytest.mark.parametrize(
    "options", [{}, {"runtime": "onnxruntime"}, {"stream": True}, {"device_memory": "5MB"}], ids=str
)
def test_the_files_of_all_stages_are_brought_at_a_time(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one chunk are hashed by one thread each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(3)))
    x = torch.ones(1, SIZE)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m", stages=3, onnx=True)
    together: list[int] = []

    def counted(reads: Sequence[FileRead], **more: Any) -> Any:
        together.append(len(reads))
        return read_chunks(reads, **more)

    monkeypatch.setattr(weight_files, "read_chunks", counted)
    monkeypatch.setenv(weight_files.VERIFIED_FILES_VARIABLE, "")
    with torch.no_grad():
        assert torch.allclose(stagepack.load(bundle, **options)(x), model(x), atol=1e-5)
    assert [count for count in together if count] == ([] if "stream" in options else [3])
