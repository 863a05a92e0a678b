"""Export of a sharded Llama of random weights against `cp` of its files and `torch.export.save`: seconds, and memory.

Three exports: `stagepack` as the command does it, the weights going from file to file; the same model loaded into memory first; and
`torch.export.save` of the model in memory. Each runs in a process of its own, in turn, and ends with what it wrote synchronized to disk.
The part that writes weights is timed alone too: `cp` of the checkpoint, and `sync`, are beside it in the same turn. The files are in the
page cache unless the model is larger than it. A virtual machine gives memory that it freed back to its host within seconds, and gets it
again slowly: `cp` waits before it begins as long as an export does before it writes, else it alone would write into warm memory.

Memory is sampled every 5 ms: `RssAnon`, private to the process, and `VmRSS`, which has the pages of mapped files too: these belong to the
page cache and are given back when others need memory. With `--memory-limit` the export runs in a control group of so many bytes, in which
the page cache counts (needs root and control groups of version 1).
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from stagepack.capture.inputs import Inputs
from stagepack.capture.transformers.hugging_face import capture_pretrained
from stagepack.format.file_writing import synchronize
from stagepack.format.quantities import parse_byte_size
from stagepack.format.writer import BundleWriter
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tools.benchmark_models import llama_config
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import memory_of_status, run_python, seconds_of

# Sizes that give 0.27, 2.2 and 16 GB of bfloat16: layers, hidden, intermediate, vocabulary.
SIZES = {"small": (8, 1024, 2816, 32000), "2GB": (16, 2048, 8192, 32000), "8B": (32, 4096, 14336, 128256)}
WAYS = ("stagepack", "stagepack, model in memory", "torch.export.save")
_PAUSE_SECONDS = 10
_SHARD_BYTES = 4 * 2**30
_CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")


def main() -> None:
    """Measure and print; or, with `--way`, be one of the processes that are measured."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="2GB")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--folder", type=Path, help="where the files are written and removed; by default a temporary one"
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="for the first way, such as 2GiB")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(_measure_here(options.way, options.folder, options.stages)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, benchmark_results(options.json) as results:
        _measure(results, Path(folder), options)


def _measure(results: BenchmarkResults, folder: Path, options: argparse.Namespace) -> None:
    source = folder / "model"
    weight_bytes = _write_checkpoint(source, *SIZES[options.size])
    title = f"A Llama of {weight_bytes / 1e9:.3g} GB of bfloat16 in {len(list(source.glob('*.safetensors')))} files"
    limit = f"; {options.memory_limit} of memory, page cache included, for {WAYS[0]}" if options.memory_limit else ""
    table = results.table(
        f"{title}, exported into {options.stages} stages{limit}; medians of {options.runs}",
        *("way", "seconds", "of these weights, s", "GB/s of weights", "private memory, MiB", "with mapped files, MiB"),
    )
    copies: list[dict[str, float]] = []
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for run in range(options.runs):
        for way in options.ways:
            # In turn which of the two is first: the first one may find more of the source in the page cache.
            if run % 2:
                measured[way].append(_measure_process(way, folder, options))
            copies.append(_measure_copy(source, folder / "copy"))
            if not run % 2:
                measured[way].append(_measure_process(way, folder, options))
    for way, runs in measured.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "digest"}
        rate = weight_bytes / middle["weights_s"] / 1e9 if middle["weights_s"] else 0.0
        table.add(way, middle["seconds"], middle["weights_s"], rate, middle["private_mib"], middle["resident_mib"])
    copy_s, synced_s = (statistics.median(copy[key] for copy in copies) for key in ("copied", "synced"))
    table.add("cp -r", copy_s, copy_s, weight_bytes / copy_s / 1e9, "", "")
    table.add("cp -r, and sync", synced_s, synced_s, weight_bytes / synced_s / 1e9, "", "")
    ratios = results.table(
        "Each run beside the cp of its turn", "ratio", *(str(run + 1) for run in range(options.runs))
    )
    ours = measured.get(WAYS[0], [])
    pairs = [(run["weights_s"], copies[index * len(options.ways)]) for index, run in enumerate(ours)]
    if pairs:
        ratios.add("cp and sync, over weights of stagepack", *(copy["synced"] / seconds for seconds, copy in pairs))
        ratios.add("cp without sync, over the same", *(copy["copied"] / seconds for seconds, copy in pairs))
    digests = {run["digest"] for runs in measured.values() for run in runs if run["digest"]}
    print(f"digests of all bundles: {', '.join(digests)}")
    assert len(digests) <= 1


def _measure_copy(source: Path, target: Path) -> dict[str, float]:
    """Time `cp` of the checkpoint, and the synchronization after it."""
    os.sync()
    time.sleep(_PAUSE_SECONDS)
    start_time = time.perf_counter()
    subprocess.run(["/bin/cp", "-r", str(source), str(target)], check=True)
    copied = time.perf_counter() - start_time
    os.sync()
    synced = time.perf_counter() - start_time
    shutil.rmtree(target)
    return {"copied": copied, "synced": synced}


def _measure_process(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one way in a process of its own."""
    os.sync()
    arguments = ("-m", "tools.bench_export", "--way", way, "--folder", str(folder), "--stages", str(options.stages))
    with _control_group(options.memory_limit if way == WAYS[0] else None) as group:
        joined = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] if group else []
        measured: dict[str, Any] = run_python(*arguments, command=joined)
    return measured


@contextlib.contextmanager
def _control_group(limit: str | None) -> Iterator[Path | None]:
    if limit is None:
        yield None
        return
    group = _CONTROL_GROUPS / f"bench_export_{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(parse_byte_size(limit)))
        yield group
    finally:
        group.rmdir()


def _measure_here(way: str, folder: Path, stages: int) -> dict[str, Any]:
    """Export in this process, and remove what was written."""
    source, out = folder / "model", folder / "out.pt2"
    peaks = {"RssAnon": 0, "VmRSS": 0}
    threading.Thread(target=_sample_memory, args=(peaks,), daemon=True).start()
    weight_times: list[float] = []
    _time_weights(weight_times)
    start_time = time.perf_counter()
    digest = ""
    if way == WAYS[2]:
        capture = capture_pretrained(str(source), Inputs(), deferred=False)
        weight_times.append(
            seconds_of(lambda: torch.export.save(capture.program, out)) + seconds_of(lambda: synchronize(out))
        )
    else:
        capture = capture_pretrained(str(source), Inputs(), deferred=way == WAYS[0])
        digest = export_capture(capture, out=out, cut_options=CutOptions(stages=stages)).digest
    seconds = time.perf_counter() - start_time
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink()
    return {
        "seconds": seconds,
        "weights_s": sum(weight_times),
        "private_mib": peaks["RssAnon"] / 2**20,
        "resident_mib": peaks["VmRSS"] / 2**20,
        "digest": digest,
    }


def _time_weights(weight_times: list[float]) -> None:
    """Append the seconds of each weight file that is written, and of the end of the bundle, which synchronizes them all."""
    for method_name in ("write_tensors", "finish"):
        setattr(BundleWriter, method_name, _timed(getattr(BundleWriter, method_name), weight_times))


def _timed(function: Callable[..., None], times: list[float]) -> Callable[..., None]:
    return lambda *args, **kwargs: times.append(seconds_of(partial(function, *args, **kwargs)))


def _sample_memory(peaks: dict[str, int]) -> None:
    """Keep the largest values of fields of /proc/self/status, in bytes."""
    while True:
        for field, peak in peaks.items():
            peaks[field] = max(peak, memory_of_status(field))
        time.sleep(0.005)


def _write_checkpoint(folder: Path, layers: int, hidden: int, intermediate: int, vocabulary: int) -> int:
    """Write a Hugging Face folder of random weights, in shards of at most 4 GiB; return the bytes of the weights."""
    config = llama_config(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=hidden // 128,
        kv_heads=max(1, hidden // 512),
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    )
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {weight_name: tensor.shape for weight_name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: list[dict[str, torch.Size]] = [{}]
    for weight_name, shape in shapes.items():
        if 2 * sum(size.numel() for size in (*shards[-1].values(), shape)) > _SHARD_BYTES:
            shards.append({})
        shards[-1][weight_name] = shape
    torch.manual_seed(0)
    random_elements = torch.randn(2**24).mul_(0.02).to(torch.bfloat16)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {
            weight_name: _repeated(random_elements, shape, offset)
            for offset, (weight_name, shape) in enumerate(shard.items())
        }
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    weight_bytes = 2 * sum(shape.numel() for shape in shapes.values())
    index_fields = {"metadata": {"total_size": weight_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_fields))
    return weight_bytes


def _repeated(random_elements: torch.Tensor, shape: torch.Size, offset: int) -> torch.Tensor:
    """A tensor of these elements, from a position on, as often as they are needed: quicker than new ones."""
    count = shape.numel()
    if len(shape) == 1:
        return torch.ones(shape, dtype=random_elements.dtype)
    rolled = random_elements.roll(offset * 4099)
    return rolled.repeat(-(-count // rolled.numel()))[:count].reshape(shape).clone()


if __name__ == "__main__":
    main()
