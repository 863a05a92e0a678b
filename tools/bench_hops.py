"""What a hop from one process of stages to the next costs, against bare gloo, and the latency of a call by the number of stages.

A hop is the slope of the latency of one call over the number of stages, each in a process of its own, without the time that the stages
compute, which they count themselves. Bare gloo passes the same bytes around rings of as many processes, from memory that is used again
and again; its hop is the slope over the size of the ring.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack.torch_internals import gloo_process_group
from stagepack_loaders.distributed.process_group import LOOPBACK, open_store
from tools.bench_processes import call_seconds, processes
from tools.benchmark_results import BenchmarkResults, add_json_option, benchmark_results

STAGE_COUNTS = (2, 6)
HOP_BYTES = (64, 2**20, 2**25)
LATENCY_STAGE_COUNTS = (1, 2, 4, 8)
LATENCY_BYTES = 2**16
HEARTBEAT_SECONDS = 1.2  # until each process has told what it has done


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
    parser = argparse.ArgumentParser(description=__doc__)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        measure_hops(results, Path(folder))
        measure_latencies(results, Path(folder))


def measure_hops(results: BenchmarkResults, folder: Path) -> None:
    """The time that a tensor takes from process to process."""
    table = results.table("one hop", "size, bytes", "bare gloo, us", "stagepack, us", "ratio")
    first_count, last_count = STAGE_COUNTS
    for byte_count in HOP_BYTES:
        rounds = 30 if byte_count > 2**20 else 300
        first_seconds, last_seconds = (
            ring_seconds(stage_count + 1, byte_count, rounds) for stage_count in STAGE_COUNTS
        )
        bare_seconds = (last_seconds - first_seconds) / (last_count - first_count)
        latencies, computing = zip(
            *(chain_seconds(folder, stage_count, byte_count, rounds) for stage_count in STAGE_COUNTS), strict=True
        )
        seconds = (latencies[1] - latencies[0]) / (last_count - first_count) - computing[1]
        table.add(str(byte_count), bare_seconds * 1e6, seconds * 1e6, seconds / bare_seconds)


def measure_latencies(results: BenchmarkResults, folder: Path) -> None:
    """The time of a call by the number of stages."""
    table = results.table("latency of a call", "stages", "one process, us", "a process for each stage, us")
    x = torch.zeros(LATENCY_BYTES // 4)
    for stage_count in LATENCY_STAGE_COUNTS:
        bundle = export_views(folder, stage_count, LATENCY_BYTES)
        one_seconds = call_seconds(stagepack.load(bundle), x, 300)
        seconds, _ = chain_seconds(folder, stage_count, LATENCY_BYTES, 300)
        table.add(str(stage_count), one_seconds * 1e6, seconds * 1e6)


def chain_seconds(folder: Path, stage_count: int, byte_count: int, rounds: int) -> tuple[float, float]:
    """The time of a call, and that which one stage of it computes."""
    bundle = export_views(folder, stage_count, byte_count)
    with processes(bundle) as pipeline:
        seconds = call_seconds(pipeline, torch.zeros(byte_count // 4), rounds)
        time.sleep(HEARTBEAT_SECONDS)
        counts = [stage for status in pipeline.statuses().values() for stage in status.stages]
    return seconds, sum(stage.busy_seconds for stage in counts) / sum(stage.runs for stage in counts)


def export_views(folder: Path, stage_count: int, byte_count: int) -> Bundle:
    """`Views` with as many stages as steps."""
    path = folder / f"views-{stage_count}-{byte_count}.stagepack"
    if path.exists():
        return stagepack.open(path)
    split_at = [f"steps.{number}" for number in range(1, stage_count)]
    return stagepack.export(Views(stage_count), (torch.zeros(byte_count // 4),), out=path, split_at=split_at)


def ring_seconds(size: int, byte_count: int, rounds: int) -> float:
    """The time that bare gloo takes to pass a tensor around a ring of processes."""
    store = open_store(LOOPBACK)
    context = multiprocessing.get_context("spawn")
    members = [
        context.Process(target=run_ring, args=(store.port, rank, size, byte_count, rounds)) for rank in range(1, size)
    ]
    for member in members:
        member.start()
    seconds = _pass_around(store, 0, size, byte_count, rounds)
    for member in members:
        member.join()
    return seconds


def run_ring(port: int, rank: int, size: int, byte_count: int, rounds: int) -> None:
    """Pass tensors on."""
    torch.set_num_threads(1)
    _pass_around(open_store(LOOPBACK, port), rank, size, byte_count, rounds)


def _pass_around(store: Any, rank: int, size: int, byte_count: int, rounds: int) -> float:
    group = gloo_process_group(store, rank, size, timedelta(seconds=60), LOOPBACK)
    memory = torch.zeros(byte_count, dtype=torch.uint8)
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    durations = []
    for _ in range(rounds + 1):
        start_time = time.perf_counter()
        if rank == 0:
            group.send([memory], next_rank, 1).wait()
        group.recv([memory], previous_rank, 1).wait()
        if rank:
            group.send([memory], next_rank, 1).wait()
        durations.append(time.perf_counter() - start_time)
    return statistics.median(durations[1:])


if __name__ == "__main__":
    main()
