"""Deltas of a bundle: their bytes, and the time to apply them, against copies of the new bundle and tools that compress differences.

The bundles have one weight file of bfloat16 with values of a model. Three steps of training change it: 1 % of the elements are replaced at
random, an optimizer adds up to 1e-6 to weights whose float32 copies it keeps, and a LoRA of rank 16 is merged into all layers. The sides
take turns; the median of the rounds counts. `cp` copies the new bundle with its folder, and writes it back to the disk as `apply` does.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import stagepack
from stagepack.format.file_writing import synchronize
from stagepack.format.manifest import Manifest
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import BundleWriter
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import median_ratio, medians, seconds_in_turns, seconds_of
from tools.page_cache import warm_up

Array = numpy.ndarray[Any, Any]
WIDTH = 4096
WEIGHTS = "stage-0.safetensors"
_SMALL_TENSORS, _LARGE_TENSORS = 18_000, 300
_RANK = 16

# Returns the new values of a tensor of float32, by its number; they are rounded to bfloat16.
Step = Callable[[int, Array], Array]


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="the size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers", action="store_true", help="also run zstd --patch-from and bsdiff4, which take minutes"
    )
    parser.add_argument("--folder", type=Path, help="where the bundles are written; by default a temporary folder")
    options = parser.parse_args()
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        manifest = small_manifest(folder)
        measure_steps(results, folder, manifest, options)
        measure_small_tensors(results, folder, manifest, options)


def small_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, whose weight file the versions replace."""
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=folder / "small.stagepack")
    return bundle.manifest


def write_version(
    path: Path, manifest: Manifest, shapes: list[tuple[int, ...]], values: Callable[[int], Array]
) -> None:
    """Write a bundle with the weight file that has the values of each tensor, by its number, as bfloat16."""
    specs = [
        TensorSpec(name=f"layers.{index}.weight", dtype="bfloat16", shape=shape) for index, shape in enumerate(shapes)
    ]
    with BundleWriter(path, overwrite=False) as writer:
        for entry in manifest.files:
            if entry.name != WEIGHTS:
                writer.link_file(path.parent / "small.stagepack" / entry.name, entry)
        writer.write_tensors(WEIGHTS, specs, lambda name: [rounded(values(int(name.split(".")[1]))).data])
        writer.finish(manifest)


def rounded(values: Array) -> Array:
    """Values as the bits of bfloat16, rounded to the nearest."""
    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16).reshape(-1)


def values_of(index: int, shape: tuple[int, ...]) -> Array:
    """The float32 values of a tensor, the same at each call."""
    return numpy.random.default_rng(index).standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)


def values_in(shapes: list[tuple[int, ...]], index: int) -> Array:
    """The values of a tensor of the old version."""
    return values_of(index, shapes[index])


def stepped(step: Step, shapes: list[tuple[int, ...]], index: int) -> Array:
    """The values of a tensor of the next version."""
    return step(index, values_of(index, shapes[index]))


def replaced(index: int, values: Array) -> Array:
    """1 % of the elements at random."""
    random = numpy.random.default_rng(10**6 + index)
    chosen = numpy.asarray(random.random(values.shape, dtype=numpy.float32)) < 0.01
    values[chosen] = random.standard_normal(int(chosen.sum()), dtype=numpy.float32) * numpy.float32(0.02)
    return values


def optimizer_step(index: int, values: Array) -> Array:
    """A step of Adam at a learning rate of 1e-6, whose normalized moments are drawn."""
    random = numpy.random.default_rng(2 * 10**6 + index)
    moments = numpy.asarray(random.uniform(-1.1, 1.1, values.shape))
    return values + numpy.float32(1e-6) * moments.astype(numpy.float32)


def merged_adapter(index: int, values: Array) -> Array:
    """The product of a LoRA added to the rounded weights."""
    random = numpy.random.default_rng(3 * 10**6 + index)
    a, b = (
        random.standard_normal(shape, dtype=numpy.float32)
        for shape in ((values.shape[0], _RANK), (_RANK, values.shape[1]))
    )
    old = (rounded(values).astype(numpy.uint32) << 16).view(numpy.float32).reshape(values.shape)
    return old + numpy.float32(7e-5) * (a @ b)


STEPS: Mapping[str, Step] = {
    "1 % replaced at random": replaced,
    "Adam, 1e-6": optimizer_step,
    "merged LoRA": merged_adapter,
}


def measure_steps(results: BenchmarkResults, folder: Path, manifest: Manifest, options: Any) -> None:
    """Measure each step of training."""
    shapes: list[tuple[int, ...]] = [(WIDTH, WIDTH)] * max(1, round(options.gigabytes * 1e9 / (2 * WIDTH * WIDTH)))
    old = folder / "old.stagepack"
    write_version(old, manifest, shapes, partial(values_in, shapes))
    size = (old / WEIGHTS).stat().st_size
    table = results.table(
        f"deltas of {size / 1e9:.2f} GB of bfloat16, median of {options.rounds}",
        "step", "changed, %", "bytes, % of the model", "make, s", "apply, s", "cp and sync, s", "apply, GB/s", "speed over cp",
    )  # fmt: skip
    peers = results.table(
        "a merged LoRA by other tools", "tool", "bytes, MB", "bytes, % of the file", "make, s", "apply, s"
    )
    for step_name, step in STEPS.items():
        new, delta = folder / "new.stagepack", folder / "step.delta"
        write_version(new, manifest, shapes, partial(stepped, step, shapes))
        make_seconds = seconds_of(partial(stagepack.delta, old, new, out=delta))
        seconds = apply_in_turns(folder, old, new, delta, options.rounds)
        median = medians(seconds)
        delta_bytes = folder_bytes(delta)
        table.add(
            step_name, 100 * changed_share(old, new), 100 * delta_bytes / folder_bytes(new), make_seconds, median["apply"], median["cp"],
            size / median["apply"] / 1e9, median_ratio(seconds["cp"], seconds["apply"]),
        )  # fmt: skip
        if step is merged_adapter and options.peers:
            peers.add("stagepack", delta_bytes / 1e6, 100 * delta_bytes / size, make_seconds, median["apply"])
            measure_zstd(peers, folder, old / WEIGHTS, new / WEIGHTS)
            measure_bsdiff(peers, shapes[0])
        shutil.rmtree(new)
        shutil.rmtree(delta)
    shutil.rmtree(old)


def changed_share(old: Path, new: Path) -> float:
    """The share of elements that differ, in the first tensors."""
    first, second = (
        numpy.fromfile(path / WEIGHTS, numpy.uint16, count=2 * WIDTH * WIDTH, offset=4096) for path in (old, new)
    )
    return float((first != second).mean())


def folder_bytes(folder: Path) -> int:
    """The bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def apply_in_turns(folder: Path, old: Path, new: Path, delta: Path, rounds: int) -> dict[str, list[float]]:
    """Apply a delta, and copy the bundle that it makes, in turns."""
    out, copy = folder / "applied.stagepack", folder / "copied.stagepack"

    def apply() -> None:
        stagepack.apply_deltas(old, [delta], out=out)

    def copy_folder() -> None:
        subprocess.run(["/bin/cp", "-r", new, copy], check=True)
        for path in (*copy.iterdir(), copy):
            synchronize(path)

    seconds: dict[str, list[float]] = {"apply": [], "cp": []}
    for round_number in range(rounds + 1):
        for path in (old / WEIGHTS, new / WEIGHTS, *delta.iterdir()):
            warm_up(path)
        for side, found in seconds_in_turns({"apply": apply, "cp": copy_folder}, 1).items():
            seconds[side] += found if round_number else []  # the first round does not count
        assert stagepack.open(out).digest == stagepack.open(new).digest
        shutil.rmtree(out)
        shutil.rmtree(copy)
    return seconds


def measure_zstd(peers: Any, folder: Path, old: Path, new: Path) -> None:
    """The difference of two files by zstd, on the same number of threads."""
    patch, out = folder / "patch.zst", folder / "patched"
    options = ["zstd", "-q", "-f", "--long=31", "-T0", f"--patch-from={old}"]
    make_seconds = seconds_of(lambda: subprocess.run([*options, str(new), "-o", str(patch)], check=True))
    apply_seconds = seconds_of(
        lambda: subprocess.run([*options, "--memory=2048MB", "-d", str(patch), "-o", str(out)], check=True)
    )
    peers.add(
        "zstd --patch-from",
        patch.stat().st_size / 1e6,
        100 * patch.stat().st_size / new.stat().st_size,
        make_seconds,
        apply_seconds,
    )
    patch.unlink()
    out.unlink()


def measure_bsdiff(peers: Any, shape: tuple[int, ...]) -> None:
    """The difference of one tensor by bsdiff4, and by the codes of a delta."""
    import bsdiff4  # type: ignore[import-not-found]  # noqa: PLC0415 - of this measurement alone

    from stagepack.deltas.codes import decode_planes  # noqa: PLC0415 - the same
    from stagepack.deltas.encoding import encode_smallest  # noqa: PLC0415 - the same

    values = values_of(0, shape)[: WIDTH // 8]
    old, new = rounded(values), rounded(merged_adapter(0, values))
    start = time.perf_counter()
    patch = bsdiff4.diff(old.tobytes(), new.tobytes())
    made = time.perf_counter()
    assert bsdiff4.patch(old.tobytes(), patch) == new.tobytes()
    peers.add(
        f"bsdiff4, a tensor of {old.nbytes / 1e6:.1f} MB",
        len(patch) / 1e6,
        100 * len(patch) / old.nbytes,
        made - start,
        time.perf_counter() - made,
    )
    start = time.perf_counter()
    _, count, frames = encode_smallest(new, old)
    made = time.perf_counter()
    assert ((old ^ decode_planes([memoryview(frame) for frame in frames], count, 2)) == new).all()
    size = sum(map(len, frames))
    peers.add(
        "stagepack, the same tensor", size / 1e6, 100 * size / old.nbytes, made - start, time.perf_counter() - made
    )


def measure_small_tensors(results: BenchmarkResults, folder: Path, manifest: Manifest, options: Any) -> None:
    """The same bytes in many tensors and in few."""
    table = results.table(
        f"1 % replaced in the same bytes in few and many tensors, median of {options.rounds}",
        "tensors", "MB", "delta, MB", "make, s", "apply, s", "over few",
    )  # fmt: skip
    elements = round(options.gigabytes * 0.25e9 / 2)
    paths: dict[int, tuple[Path, Path]] = {}
    made: dict[int, float] = {}
    for count in (_LARGE_TENSORS, _SMALL_TENSORS):
        shapes: list[tuple[int, ...]] = [(elements // count,)] * count
        old, new, delta = (folder / f"{kind}-{count}" for kind in ("old", "new", "delta"))
        write_version(old, manifest, shapes, partial(values_in, shapes))
        write_version(new, manifest, shapes, partial(stepped, replaced, shapes))
        made[count] = seconds_of(partial(stagepack.delta, old, new, out=delta))
        paths[count] = old, delta

    def apply(count: int) -> float:
        old, delta = paths[count]
        seconds = seconds_of(lambda: stagepack.apply_deltas(old, [delta], out=folder / "applied"))
        shutil.rmtree(folder / "applied")
        return seconds

    seconds: dict[int, list[float]] = {count: [] for count in paths}
    for round_number in range(options.rounds + 1):
        for count in paths:
            found = apply(count)
            seconds[count] += [found] if round_number else []
    for count, found_seconds in seconds.items():
        old, delta = paths[count]
        few = seconds[_LARGE_TENSORS]
        table.add(
            f"{count:,}", (old / WEIGHTS).stat().st_size / 1e6, folder_bytes(delta) / 1e6, made[count],
            sorted(found_seconds)[len(found_seconds) // 2], median_ratio(found_seconds, few),
        )  # fmt: skip


if __name__ == "__main__":
    main()
