"""A stage on the CPU until its first answer: stagepack against other loaders of the same bytes, from the page cache, the disk and tmpfs.

Each run is a process of its own. stagepack finds the weight file in its record of verified files, which an earlier run wrote, but where it
is the `first load`, which finds no record; on a `new machine`, it finds no record of checked graphs either. The loaders take turns; the
median of their runs counts. `cold` is after eviction from the page cache, which is checked. The limits are those of storage and processor
in the same state: threads that read the file into memory and do nothing else, and threads that also hash it.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import stagepack
from stagepack.errors import Problem
from stagepack.format.chunk_reads import FileRead, read_chunks
from tools.benchmark_models import Layers, without_values
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.load_programs import BUNDLE, CHECKPOINT, PROGRAM, PROGRAMS, WEIGHTS, WIDTH, is_installed
from tools.measuring import run_python, seconds_in_turns, seconds_of
from tools.page_cache import evict, resident_share, warm_up

BASELINE = "safetensors, mapped"
_MOST_COLD_SHARE = 0.01


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="the size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", nargs="+", choices=["warm", "cold", "tmpfs"], default=["warm", "cold", "tmpfs"])
    parser.add_argument("--programs", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS])
    parser.add_argument("--folder", type=Path, help="where the models are written; by default a temporary folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    program_names = [program_name for program_name in options.programs if is_installed(program_name)]
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_model(Path(folder), options.gigabytes)
        measure_digests(results, Path(folder))
        for state in options.states:
            with folder_in_state(Path(folder), state) as state_folder:
                measure_state(results, state, state_folder, program_names, options.rounds)


def write_model(folder: Path, gigabytes: float) -> None:
    """Write one model as a bundle of one stage, a checkpoint of torch, and an exported program."""
    layer_count = max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * 4)))
    model: Layers = without_values(lambda: Layers(layer_count, WIDTH))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (torch.ones(2, WIDTH),)
    stagepack.export(model, example, out=folder / BUNDLE, stages=1, dynamic_shapes=({0: batch},))
    torch.save(model.state_dict(), folder / CHECKPOINT)
    torch.export.save(torch.export.export(model, example, dynamic_shapes=({0: batch},)), folder / PROGRAM)


def measure_digests(results: BenchmarkResults, folder: Path) -> None:
    """Compare the weight file with its digests, by one thread and by one for each processor, in turns."""
    table = results.table(
        "Digests of the weight file, warm, fastest of 5", "threads", "time, s", "GB/s", "over 1 thread"
    )
    entry = stagepack.open(folder / BUNDLE).files[Path(WEIGHTS).name]
    processors = os.sched_getaffinity(0)
    thread_counts = sorted({1, len(processors)})

    def compare(thread_count: int) -> None:
        os.sched_setaffinity(0, sorted(processors)[:thread_count])
        assert not _problems(folder / WEIGHTS, hashed=True)

    warm_up(folder / WEIGHTS)
    seconds = seconds_in_turns({str(count): partial(compare, count) for count in thread_counts}, 5)
    os.sched_setaffinity(0, processors)
    for thread_count, fastest in ((thread_count, min(times)) for thread_count, times in seconds.items()):
        table.add(thread_count, fastest, entry.size / fastest / 1e9, min(seconds["1"]) / fastest)


@contextmanager
def folder_in_state(folder: Path, state: str) -> Iterator[Path]:
    """Yield the folder that holds the models in a state: the folder itself, or a copy in memory."""
    if state != "tmpfs":
        yield folder
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_folder:
        copied_folder = Path(memory_folder) / "models"
        shutil.copytree(folder, copied_folder)
        yield copied_folder


def measure_state(results: BenchmarkResults, state: str, folder: Path, program_names: list[str], rounds: int) -> None:
    """Run each program in turns, and add a table."""
    size = (folder / WEIGHTS).stat().st_size
    table = results.table(
        f"{state}: {size / 1e9:.2f} GB of weights until the first answer, median of {rounds}",
        "loader",
        "loaded, s",
        "first answer, s",
        "processor, s",
        "GB/s",
        f"over {BASELINE}",
        "private memory, MB",
    )
    limits = read_limits(folder / WEIGHTS)
    runs: dict[str, list[dict[str, float]]] = {side_name: [] for side_name in (*program_names, *limits)}
    for round_number in range(rounds):
        # Another order in each round, so that none always comes after the same one.
        order = [*runs][round_number % len(runs) :] + [*runs][: round_number % len(runs)]
        for side_name in order:
            if side_name in limits:
                _bring_into_state(folder / WEIGHTS, state)
                seconds = seconds_of(limits[side_name])
                runs[side_name].append({"load": seconds, "answer": seconds, "processor": 0, "memory": 0})
            else:
                _bring_into_state(folder / PROGRAMS[side_name][1], state)
                runs[side_name].append(_run(side_name, folder))
    checks = {run["check"] for side_name in program_names for run in runs[side_name]}
    assert len(checks) == 1, f"expected one answer of all loaders, found {checks}"
    baseline = statistics.median(run["answer"] for run in runs[BASELINE]) if BASELINE in runs else float("nan")
    for side_name, measured in runs.items():
        load, answer, processor, memory = (
            statistics.median(run[key] for run in measured) for key in ("load", "answer", "processor", "memory")
        )
        table.add(side_name, load, answer, processor, size / answer / 1e9, answer / baseline, memory / 1e6)


def _bring_into_state(path: Path, state: str) -> None:
    if state == "cold":
        evict(path)
        share = resident_share(path)
        if share > _MOST_COLD_SHARE:
            raise SystemExit(f"{path}: expected a file that is not in the page cache, found {share:.0%} of it there")
    else:
        warm_up(path)


def _run(program_name: str, folder: Path) -> dict[str, float]:
    try:
        measured: dict[str, float] = run_python("-W", "ignore", "-m", "tools.load_programs", program_name, str(folder))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{program_name}: {error.stderr[-2000:]}") from None
    return measured


def read_limits(weights: Path) -> dict[str, Callable[[], object]]:
    """What storage and processor allow: to read a weight file of a bundle by a thread for each processor, and to hash it too."""
    return {
        "limit: read by threads": partial(_problems, weights, hashed=False),
        "limit: read and hashed by threads": partial(_problems, weights, hashed=True),
    }


def _problems(weights: Path, *, hashed: bool) -> list[Problem]:
    entry = stagepack.open(weights.parent).files[weights.name]
    with weights.open("rb") as file:
        return read_chunks([FileRead(entry, file.fileno())], compare=hashed)


if __name__ == "__main__":
    main()
