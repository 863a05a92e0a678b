"""Stages that are ready before their weights are read."""

import copy
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stagepack
from stagepack.errors import DigestError, OptionError
from stagepack.format.chunks import CHUNK_BYTES
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Loading
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import prepare
from stagepack_loaders.torch.prepare import PreparedTorchStage, prepare_stages
from stagepack_loaders.torch.weight_store import ArrivingStore
from stagepack_loaders.torch.weight_transfer import ArrivingFiles, empty_bytes
from stagepack_loaders.weight_files import FolderReader
from tests.bundle_editor import BundleEditor


class TwoLayers(nn.Module):
    """Two layers of one chunk each, the second one in autocast, a view of a weight, and a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
        self.register_buffer("count", torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        hidden = self.first(x).relu() + self.first.weight.t()[0]
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(hidden).float() + self.count


class HoldingReader(FolderReader):
    """Reads files; what begins after a position waits until `rest` is set."""

    def __init__(self, folder: Path, position: int) -> None:
        super().__init__(folder)
        self._position = position
        self.rest = threading.Event()

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        if start >= self._position:
            assert self.rest.wait(60)
        super().read_into(file_name, start, memory)


class LinearsSeen(TorchDispatchMode):
    """Counts the matrix products that are computed, and calls a function after the first one."""

    def __init__(self, after_first: Any = lambda: None) -> None:
        super().__init__()
        self.count = 0
        self._after_first = after_first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.count += 1
            if self.count == 1:
                self._after_first()
        return result


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    return stagepack.export(TwoLayers(), (torch.randn(2, 2048),), out=tmp_path_factory.mktemp("streaming") / "m")


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def _stream(bundle: Bundle, reader: HoldingReader) -> Pipeline:
    loading = Loading(options=LoadOptions(stream=True, runtime="torch"))
    loading.shared.get(FolderReader, lambda: reader)
    prepared = prepare(bundle, loading)
    return Pipeline(bundle, [stage.finish(verify=True) for stage in prepared.values()], [])


@pytest.mark.usefixtures("no_gradients")
def test_computes_before_the_last_byte_is_read(bundle: Bundle) -> None:
    x = torch.randn(2, 2048)
    expected = stagepack.load(bundle)(x)
    reader = HoldingReader(bundle.path, 2 * CHUNK_BYTES)
    pipeline = _stream(bundle, reader)
    with LinearsSeen(reader.rest.set) as seen:
        assert not reader.rest.is_set()
        answer = pipeline(x)
    assert seen.count == 2
    assert torch.equal(answer, expected)
    stage = stagepack.load_stage(bundle, 0, stream=True)
    assert torch.equal(stage(x)[0], expected)
    assert torch.equal(stage(x)[0], expected + 1), "a second call"


@pytest.mark.usefixtures("no_gradients")
def test_a_copy_and_a_state_dict_have_all_weights(bundle: Bundle) -> None:
    expected = stagepack.load_stage(bundle, 0).state_dict()
    stage = stagepack.load_stage(bundle, 0, stream=True)
    for state_entries in (copy.deepcopy(stage).state_dict(), stage.state_dict()):
        assert expected.keys() == state_entries.keys()
        assert all(torch.equal(expected[weight_name], state_entries[weight_name]) for weight_name in expected)


def _of_part(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda stage: function(stage.last)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(
    "function",
    [
        copy.deepcopy,
        lambda module: module.double(),
        lambda module: module.to(torch.float64),
        lambda module: module.state_dict(),
        lambda module: module.load_state_dict(
            {key: torch.zeros_like(value) for key, value in module.named_parameters()}, strict=False
        ),
    ],
    ids=["deepcopy", "double", "to", "state_dict", "load_state_dict"],
)
@pytest.mark.parametrize("of", [lambda function: function, _of_part], ids=["stage", "part"])
def test_what_reads_or_replaces_weights_waits_for_them(
    bundle: Bundle, of: Callable[[Any], Callable[[Any], Any]], function: Callable[[Any], Any]
) -> None:
    function = of(function)
    expected_stage: Any = stagepack.load_stage(bundle, 0, copy=True)
    expected = function(expected_stage)
    reader = HoldingReader(bundle.path, CHUNK_BYTES)
    stage: Any = _stream(bundle, reader).stages[0]
    timer = threading.Timer(0.05, reader.rest.set)
    timer.start()
    result = function(stage)
    assert reader.rest.is_set()
    timer.join()
    for got, wanted in ((_tensors(result), _tensors(expected)), (_tensors(stage), _tensors(expected_stage))):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    if isinstance(result, nn.Module):
        return result.state_dict()
    return result if isinstance(result, dict) else {}


class OverwrittenReader(HoldingReader):
    """Overwrites the weights of a stage after each read, as a user may do who does not wait for them."""

    weights: tuple[torch.Tensor, ...] = ()

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        super().read_into(file_name, start, memory)
        for weight in self.weights:
            weight.detach().zero_()


def test_a_write_before_the_weights_are_there_does_not_make_the_file_a_damaged_one(bundle: Bundle) -> None:
    reader = OverwrittenReader(bundle.path, CHUNK_BYTES)
    stage: Any = _stream(bundle, reader).stages[0]
    reader.weights = tuple(stage.parameters())
    reader.rest.set()
    stage.wait_for_weights()


@pytest.mark.usefixtures("no_gradients")
def test_a_changed_chunk_fails_the_call_that_needs_it(bundle: Bundle, tmp_path: Path) -> None:
    editor = BundleEditor.copy(bundle.path, tmp_path / "changed")
    [weight_file] = bundle.stages[0].weights
    editor.flip_bit(weight_file, bundle.files[weight_file].size - 5)
    changed = stagepack.open(editor.path)
    stage = stagepack.load_stage(changed, 0, stream=True)
    for _ in range(2):
        with LinearsSeen() as seen, pytest.raises(DigestError, match="expected blake3"):
            stage(torch.randn(2, 2048))
        assert seen.count == 1
    stagepack.load_stage(changed, 0, stream=True, verify="manifest")(torch.randn(2, 2048))


@pytest.mark.usefixtures("no_gradients")
def test_a_file_that_is_cut_short_fails_the_call(bundle: Bundle, tmp_path: Path) -> None:
    changed = stagepack.open(BundleEditor.copy(bundle.path, tmp_path / "changed").path)
    [weight_file] = changed.stages[0].weights
    reader = HoldingReader(changed.path, 2 * CHUNK_BYTES)
    pipeline = _stream(changed, reader)
    os.truncate(changed.path / weight_file, 2 * CHUNK_BYTES)
    reader.rest.set()
    with pytest.raises(DigestError, match="the file ends in the bytes"):
        pipeline(torch.randn(2, 2048))


def test_cold_files_are_read_past_the_page_cache(tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20 + 17)
    path = tmp_path / "weights"
    path.write_bytes(content)
    for start, end in ((0, len(content)), (4096, 2**20), (5, 70), (3 * 2**20, len(content))):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory: Any = numpy.empty(end - start, numpy.uint8)
        FolderReader(tmp_path).read_into("weights", start, memoryview(memory))
        assert bytes(memory) == content[start:end]


def test_a_file_system_that_asks_for_a_larger_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(2**20)
    path = tmp_path / "weights"
    path.write_bytes(content)
    refused = []
    read = os.preadv

    def read_aligned(descriptor: int, buffers: Any, start: int, *flags: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and start % 65536:
            refused.append(start)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, buffers, start, *flags)

    monkeypatch.setattr(os, "preadv", read_aligned)
    monkeypatch.setattr("stagepack_loaders.weight_files.is_cached", lambda *_: False)
    reader = FolderReader(tmp_path)
    for start in (0, 4096, 8192):
        memory: Any = empty_bytes(65536, torch.device("cpu")).numpy()
        reader.read_into("weights", start, memoryview(memory))
        assert bytes(memory) == content[start : start + 65536]
    assert refused in ([], [4096]), "it is tried once, if the file system has direct reads at all"


def test_a_file_that_is_missing_is_a_digest_error(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="No such file"):
        FolderReader(tmp_path).read_into("weights", 0, memoryview(bytearray(4)))


@pytest.mark.parametrize("option", [{"compile": True}, {"processes": True}, {"runtime": "onnxruntime"}])
def test_options_that_exclude_streaming(bundle: Bundle, option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="stream"):
        stagepack.load(bundle, stream=True, **option)


@pytest.mark.usefixtures("no_gradients")
def test_a_stage_that_does_not_ask_is_ready_when_its_weights_are(bundle: Bundle, tmp_path: Path) -> None:
    """As on a GPU."""
    x = torch.randn(2, 2048)
    stage = _arriving(bundle).finish(verify=True)
    assert torch.equal(stage(x)[0], stagepack.load(bundle)(x))
    editor = BundleEditor.copy(bundle.path, tmp_path / "changed")
    [weight_file] = bundle.stages[0].weights
    editor.flip_bit(weight_file, bundle.files[weight_file].size - 5)
    prepared = _arriving(stagepack.open(editor.path))
    with pytest.raises(DigestError, match="expected blake3"):
        prepared.finish(verify=True)


def _arriving(bundle: Bundle) -> PreparedTorchStage:
    """The stage, whose files threads will read into the memory of the device."""
    [prepared] = prepare_stages(bundle, {0: torch.device("cpu")}, Loading()).values()
    return replace(prepared, store=ArrivingStore(FolderReader(bundle.path)))


def test_a_stage_that_uses_no_weight_does_not_wait_for_its_file(tmp_path: Path) -> None:
    bundle = stagepack.export(Unused(), (torch.randn(3),), out=tmp_path / "m")
    assert bundle.stages[0].weights
    reader = HoldingReader(bundle.path, 0)
    pipeline = _stream(bundle, reader)
    x = torch.randn(3)
    assert torch.equal(pipeline(x), x + 1)
    reader.rest.set()


class Unused(nn.Module):
    """A weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("verify", [False, True])
def test_files_arrive_whether_they_are_compared_or_not(bundle: Bundle, verify: bool) -> None:
    [weight_file] = bundle.stages[0].weights
    counted: list[int] = []
    read_into = FolderReader(bundle.path).read_into
    files = ArrivingFiles(bundle, torch.device("cpu"), read_into, verify=verify, progress=counted.append)
    file = files.add([weight_file])[weight_file]
    file.wait()
    assert file.has_arrived()
    assert file.memory.numpy().tobytes() == (bundle.path / weight_file).read_bytes()
    assert sum(counted) == len(file.memory)


class Tied(nn.Module):
    """Two stages that use one weight, once as it is stored and once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.strided = nn.Parameter(torch.randn(8, 8).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embedding(tokens)) @ self.strided
        return self.last(hidden @ self.strided) @ self.embedding.weight.t()


def test_a_weight_of_two_stages_is_one_parameter(tmp_path: Path) -> None:
    tokens = torch.arange(4)
    path = stagepack.export(Tied(), (tokens,), out=tmp_path / "m", stages=2).path
    results = []
    for stream in (False, True):
        pipeline: Any = stagepack.load(path, stream=stream, copy=not stream)
        first, last = (dict(stage.named_parameters()) for stage in pipeline.stages)
        shared_names = first.keys() & last.keys()
        assert "embedding.weight" in shared_names
        assert all(first[name] is last[name] for name in shared_names)
        optimizer = torch.optim.Adam([*{id(weight): weight for weight in pipeline.parameters()}.values()])
        for _ in range(2):
            optimizer.zero_grad()
            pipeline(tokens).sum().backward()
            optimizer.step()
        results.append(pipeline.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
