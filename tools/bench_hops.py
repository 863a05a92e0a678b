"""What a hop from one process of stages to the next costs, against bare gloo, and the latency of a call by the number of stages.

A hop is the slope of the latency of one call over the number of stages, each in a process of its own, without the time that the stages
compute, which is counted in each process. Bare gloo passes the same bytes around rings of as many processes, from memory that is used
again and again: once with nothing between a receive and a send, and once with the same stages between them, which compute nothing, but
leave their own data in the caches of the processor. All of them are there at once, and are called in turns of some milliseconds.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from tools.bench_processes import processes
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.gloo_rings import join_ring, started_members
from tools.measuring import median_seconds, seconds_of

# The bytes of the tensor, and the two numbers of stages. With seven processes, two cores have not the cache for the data of all.
HOPS = ((64, (1, 3)), (2**20, (1, 3)), (2**25, (1, 3)), (64, (2, 6)))
LATENCY_STAGE_COUNTS = (1, 2, 4, 8)
LATENCY_BYTES = 2**16
HEARTBEAT_SECONDS = 0.7  # until each process has told what it has done


@dataclass(frozen=True)
class Turns:
    """How often each pipeline and ring is called.

    Attributes:
        count: the turns of each.
        calls: the calls of a turn that are measured.
        warm_calls: the calls before them.
    """

    count: int
    calls: int
    warm_calls: int

    @property
    def all_calls(self) -> int:
        """The calls of a turn."""
        return self.warm_calls + self.calls


class Views(torch.nn.Module):
    """Stages that compute nothing."""

    def __init__(self, stage_count: int) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(torch.nn.Unflatten(0, (1, -1)) for _ in range(stage_count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of the input."""
        for step in self.steps:
            x = step(x).squeeze(0)
        return x


def main() -> None:
    """Measure, and print the figures."""
    options = benchmark_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        measure_hops(results, Path(folder))
        measure_latencies(results, Path(folder))


def measure_hops(results: BenchmarkResults, folder: Path) -> None:
    """The time that a tensor takes from process to process."""
    titles = ("bare gloo, us", "bare gloo around stages, us", "stagepack, us")
    ratios = ("over bare gloo", "over bare gloo around stages")
    table = results.table("one hop", "size, bytes", "stages", *titles, *ratios)
    for byte_count, stage_counts in HOPS:
        is_large = byte_count > 2**20
        turns = Turns(count=7, calls=5, warm_calls=1) if is_large else Turns(count=30, calls=40, warm_calls=20)
        bare, around, ours = hop_seconds(folder, byte_count, stage_counts, turns)
        stages = f"{stage_counts[0]} and {stage_counts[1]}"
        table.add(str(byte_count), stages, bare * 1e6, around * 1e6, ours * 1e6, ours / bare, ours / around)


def hop_seconds(
    folder: Path, byte_count: int, stage_counts: tuple[int, int], turns: Turns
) -> tuple[float, float, float]:
    """The median time of a hop: of bare gloo, of bare gloo around stages, and of stagepack."""
    bundles = [export_views(folder, stage_count, byte_count) for stage_count in stage_counts]
    hops: dict[str, list[float]] = {}
    with ExitStack() as contexts:
        callers = {
            "bare": [contexts.enter_context(ring(bundle, byte_count, turns, has_stages=False)) for bundle in bundles],
            "around": [contexts.enter_context(ring(bundle, byte_count, turns, has_stages=True)) for bundle in bundles],
            "ours": [contexts.enter_context(chain(bundle, byte_count, turns)) for bundle in bundles],
        }
        for _ in range(turns.count):
            for way, (first_caller, last_caller) in callers.items():
                (first_latency, _), (last_latency, computing) = first_caller(), last_caller()
                slope = (last_latency - first_latency) / (stage_counts[1] - stage_counts[0])
                hops.setdefault(way, []).append(slope - computing)
    bare, around, ours = (statistics.median(seconds) for seconds in hops.values())
    return bare, around, ours


# Calls a pipeline or ring for one turn: the median latency of a call, and the time that a stage of it computed.
Turn = Callable[[], tuple[float, float]]


@contextmanager
def chain(bundle: Bundle, byte_count: int, turns: Turns) -> Iterator[Turn]:
    """The stages of a bundle, each in a process of its own."""
    x = torch.zeros(byte_count // 4)
    with processes(bundle) as pipeline:
        earlier_runs, earlier_seconds = work_done(pipeline)

        def turn() -> tuple[float, float]:
            nonlocal earlier_runs, earlier_seconds
            for _ in range(turns.warm_calls):
                pipeline(x)
            latency = median_seconds(lambda: pipeline(x), turns.calls)
            runs, seconds = work_done(pipeline)
            computing = (seconds - earlier_seconds) / (runs - earlier_runs)
            earlier_runs, earlier_seconds = runs, seconds
            return latency, computing

        yield turn


def work_done(pipeline: DistributedPipeline) -> tuple[int, float]:
    """How often all stages have run, and how long."""
    time.sleep(HEARTBEAT_SECONDS)
    counts = [stage for status in pipeline.statuses().values() for stage in status.stages]
    return sum(stage.runs for stage in counts), sum(stage.busy_seconds for stage in counts)


@contextmanager
def ring(bundle: Bundle, byte_count: int, turns: Turns, *, has_stages: bool) -> Iterator[Turn]:
    """Processes that pass tensors around by bare gloo: this one, and one for each stage of a bundle."""
    stage_count = len(bundle.stages)
    path = bundle.path if has_stages else None
    arguments = [(rank, stage_count, byte_count, turns, path) for rank in range(1, stage_count + 1)]
    memory = torch.zeros(byte_count, dtype=torch.uint8)
    report = torch.zeros(1, dtype=torch.float64)
    with started_members(run_member, arguments) as group:

        def pass_around(tensor: torch.Tensor) -> None:
            group.send([tensor], 1, 1).wait()
            group.recv([tensor], stage_count, 1).wait()

        def turn() -> tuple[float, float]:
            durations = [seconds_of(lambda: pass_around(memory)) for _ in range(turns.all_calls)]
            pass_around(report.zero_())
            return statistics.median(durations[turns.warm_calls :]), report.item() / stage_count / turns.all_calls

        yield turn


@torch.no_grad()
def run_member(port: int, rank: int, stage_count: int, byte_count: int, turns: Turns, path: Path | None) -> None:
    """Pass tensors on; in each turn, a last one counts the seconds that the stages have computed."""
    torch.set_num_threads(1)
    size = stage_count + 1
    group = join_ring(port, rank, size)
    stage = None if path is None else stagepack.load_stage(path, rank - 1)
    memory = torch.zeros(byte_count // 4)
    report = torch.zeros(1, dtype=torch.float64)
    for _ in range(turns.count):
        busy_seconds = 0.0
        for _ in range(turns.all_calls):
            group.recv([memory], rank - 1, 1).wait()
            output = memory
            if stage is not None:
                start_time = time.perf_counter()
                (output,) = stage.run([memory])
                busy_seconds += time.perf_counter() - start_time
            group.send([output], (rank + 1) % size, 1).wait()
        group.recv([report], rank - 1, 1).wait()
        group.send([report + busy_seconds], (rank + 1) % size, 1).wait()


def measure_latencies(results: BenchmarkResults, folder: Path) -> None:
    """The time of a call by the number of stages."""
    table = results.table("latency of a call", "stages", "one process, us", "a process for each stage, us")
    x = torch.zeros(LATENCY_BYTES // 4)
    for stage_count in LATENCY_STAGE_COUNTS:
        bundle = export_views(folder, stage_count, LATENCY_BYTES)
        one = stagepack.load(bundle)
        one_seconds = median_seconds(lambda: one(x), 300)  # noqa: B023 - called at once
        with processes(bundle) as pipeline:
            seconds = median_seconds(lambda: pipeline(x), 300)
        table.add(str(stage_count), one_seconds * 1e6, seconds * 1e6)


def export_views(folder: Path, stage_count: int, byte_count: int) -> Bundle:
    """`Views` with as many stages as steps."""
    path = folder / f"views-{stage_count}-{byte_count}.stagepack"
    if path.exists():
        return stagepack.open(path)
    split_at = [f"steps.{number}" for number in range(1, stage_count)]
    return stagepack.export(Views(stage_count), (torch.zeros(byte_count // 4),), out=path, split_at=split_at)


if __name__ == "__main__":
    main()
