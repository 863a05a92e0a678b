"""The codes keep the bits of every dtype, and of every pattern of changes; the smallest one is taken."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.deltas.codes import decode_planes, decode_sparse, element_dtype, encode_planes, encode_sparse
from stagepack.deltas.document import BLOCK_BYTES
from stagepack.deltas.encoding import encode_smallest
from stagepack.format.dtypes import HEADER_DTYPES
from stagepack.format.manifest import Manifest
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import BundleWriter
from tests.conformance.vectors import TINY
from tests.deltas.test_roads import assert_same_folder

Array = numpy.ndarray[Any, Any]
COUNTS = (1, 2, 254, 255, 256, 257, 511, 4096)
SHARES = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)


def changed(old: Array, share: float, random: numpy.random.Generator) -> Array:
    chosen = random.random(len(old)) < share
    chosen[random.integers(len(old))] = True
    change = random.integers(1, 2 ** (8 * old.itemsize), len(old), dtype=numpy.uint64).astype(old.dtype) | 1
    return numpy.where(chosen, old ^ change, old)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_each_code_gives_the_elements_back(width: int) -> None:
    random = numpy.random.default_rng(width)
    cases = 0
    for count, share in itertools.product(COUNTS, SHARES):
        old = random.integers(0, 2 ** (8 * width) - 1, count, dtype=numpy.uint64).astype(element_dtype(width))
        new = changed(old, share, random)
        difference = old ^ new
        positions = numpy.flatnonzero(difference)
        frames = [memoryview(frame) for frame in encode_sparse(difference, positions)]
        found_positions, values = decode_sparse(frames, len(positions), count, width)
        assert (found_positions == positions).all()
        assert (values == difference[positions]).all()
        planes = [memoryview(frame) for frame in encode_planes(new)]
        assert (decode_planes(planes, count, width) == new).all()
        cases += 1
    assert cases == 48


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda old, random: numpy.where(random.random(len(old)) < 0.01, old ^ 5, old), "sparse"),
        (lambda old, random: old ^ random.integers(1, 8, len(old), dtype=numpy.uint16), "dense"),
        (lambda old, random: numpy.zeros_like(old), "whole"),
    ],
)
def test_the_smallest_code_is_taken(change: Callable[[Array, numpy.random.Generator], Array], code: str) -> None:
    random = numpy.random.default_rng(0)
    old = random.integers(0, 2**16 - 1, 2**16, dtype=numpy.uint16)
    assert encode_smallest(change(old, random), old)[0] == code


def write_version(path: Path, tensors: dict[str, tuple[TensorSpec, bytes]]) -> None:
    """A bundle whose weight file has these tensors; no road that is tested here reads its graphs."""
    manifest: Manifest = stagepack.open(TINY).manifest
    with BundleWriter(path, overwrite=False) as writer:
        for entry in manifest.files:
            if entry.name != "stage-0.safetensors":
                writer.write_file(entry.name, [(TINY / entry.name).read_bytes()])
        specs = [spec for spec, _ in tensors.values()]
        writer.write_tensors("stage-0.safetensors", specs, lambda name: [tensors[name][1]])
        writer.finish(manifest)


def versions_of(
    tmp_path: Path, specs: list[TensorSpec], share: float, seed: int = 0
) -> tuple[Path, Path, stagepack.Delta]:
    random = numpy.random.default_rng(seed)
    old, new = {}, {}
    for spec in specs:
        content = numpy.frombuffer(random.bytes(spec.nbytes), numpy.uint8)
        old[spec.name] = spec, content.tobytes()
        new[spec.name] = spec, (changed(content, share, random) if len(content) else content).tobytes()
    write_version(tmp_path / "old", old)
    write_version(tmp_path / "new", new)
    return tmp_path / "old", tmp_path / "new", stagepack.delta(tmp_path / "old", tmp_path / "new", out=tmp_path / "d")


@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_all_dtypes_and_shapes_are_applied(tmp_path: Path, share: float) -> None:
    shapes = [(), (0,), (3, 0), (1,), (7, 5), (70_001,)]
    specs = [
        TensorSpec(name=f"{dtype}.{number}", dtype=dtype, shape=shape)
        for dtype in HEADER_DTYPES
        if dtype not in ("complex128", "complex32")
        for number, shape in enumerate(shapes)
    ]
    old, new, delta = versions_of(tmp_path, specs, share)
    stagepack.apply_deltas(old, [delta], out=tmp_path / "applied")
    assert_same_folder(tmp_path / "applied", new)
    named = {name for name in delta.changed_tensors("stage-0.safetensors")}
    assert named == {spec.name for spec in specs if spec.nbytes}


def test_tensors_of_several_blocks_and_chunks(tmp_path: Path) -> None:
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(size,)) for name, size in (("a", 9 * 2**20), ("b", 77))]
    old, new, delta = versions_of(tmp_path, specs, 0.01)
    stagepack.apply_deltas(old, [delta], out=tmp_path / "applied")
    assert_same_folder(tmp_path / "applied", new)
    [parts] = [entry.parts for entry in delta.document.changed]
    assert all(part.start // BLOCK_BYTES == (part.end - 1) // BLOCK_BYTES for part in parts)
    # Ranges that begin and end within parts and elements.
    composed = stagepack.open(old, deltas=[delta])
    expected = (new / "stage-0.safetensors").read_bytes()
    random = numpy.random.default_rng(3)

    with contextlib.ExitStack() as open_files:
        read = composed.open_read(open_files, "stage-0.safetensors")
        for _ in range(60):
            start = int(random.integers(len(expected)))
            memory = bytearray(int(random.integers(1, 5_000_000)))
            memory = memory[: len(expected) - start]
            read.fill(start, memoryview(memory))
            assert memory == expected[start : start + len(memory)]


def test_small_tensors_share_parts_and_keep_their_names(tmp_path: Path) -> None:
    specs = [TensorSpec(name=f"t{number}", dtype="float32", shape=(33,)) for number in range(500)]
    old, new, delta = versions_of(tmp_path, specs, 0.1)
    [entry] = delta.document.changed
    assert len(entry.parts) == 1
    assert entry.tensors == tuple(spec.name for spec in specs)
    assert stagepack.open(old, deltas=[delta]).changed_tensors("stage-0.safetensors") == list(entry.tensors)
    stagepack.apply_deltas(old, [delta], out=tmp_path / "applied")
    assert_same_folder(tmp_path / "applied", new)


def test_layouts_that_differ_are_applied(tmp_path: Path) -> None:
    random = numpy.random.default_rng(1)

    def tensors(*sizes: int) -> dict[str, tuple[TensorSpec, bytes]]:
        return {
            f"t{number}": (TensorSpec(name=f"t{number}", dtype="uint8", shape=(size,)), random.bytes(size))
            for number, size in enumerate(sizes)
        }

    pairs = [((100, 200), (300, 10)), ((5_000_000,), (10,)), ((10,), (5_000_000,)), ((10,), (0,)), ((0,), (9, 9))]
    for number, (before, after) in enumerate(pairs):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_version(folder / "old", tensors(*before))
        write_version(folder / "new", tensors(*after))
        for old, new in (("old", "new"), ("new", "old")):
            delta = stagepack.delta(folder / old, folder / new, out=folder / f"{new}.delta")
            stagepack.apply_deltas(folder / old, [delta], out=folder / f"{new}.applied")
            assert_same_folder(folder / f"{new}.applied", folder / new)


def test_the_bytes_of_a_delta_of_bfloat16() -> None:
    """1 % of the elements replaced at random: at most 1.35 % of the bytes; Adam at 1e-6, which changes 2.3 %: at most 1.7 %."""
    torch.manual_seed(0)
    values = torch.randn(2**22) * 0.02
    replaced = torch.where(torch.rand(len(values)) < 0.01, torch.randn(len(values)) * 0.02, values)
    stepped = values + 1e-6 * torch.empty_like(values).uniform_(-1.02, 1.02)
    old = bits(values)
    for new, most, most_changed in ((bits(replaced), 0.0135, 0.0101), (bits(stepped), 0.017, 0.024)):
        assert (old != new).mean() < most_changed
        blocks = range(0, len(old), BLOCK_BYTES // 2)
        sizes = [
            sum(map(len, encode_smallest(new[start : start + 2**20], old[start : start + 2**20])[2]))
            for start in blocks
        ]
        assert sum(sizes) <= most * old.nbytes


def bits(values: torch.Tensor) -> Array:
    return values.bfloat16().view(torch.int16).numpy().view(numpy.uint16)
