"""Stages in processes of their own: the time of a hop against bare gloo, throughput against one process, time to start, memory.

A hop is the slope of the latency over the number of stages that compute nothing. Bare gloo sends the same bytes around a ring of three
processes. Throughput is that of a model of two equal stages in two processes with one thread each, against one process with one thread
and with two; the limit of its pipeline is twice one process.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack.torch_internals import gloo_process_group
from stagepack_loaders.callable_pipeline import CallablePipeline
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.process_group import LOOPBACK, open_store
from tools.benchmark_results import BenchmarkResults, add_json_option, benchmark_results

RING_SIZE = 3
HOP_STAGES = (2, 6)
HOP_BYTES = (64, 2**20, 2**25)
LAYERS, WIDTH, BATCH_SIZE = 12, 1024, 128
CALLS = 60


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


class Layers(torch.nn.Module):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        measure_hops(results, Path(folder))
        measure_throughput(results, Path(folder))


def measure_hops(results: BenchmarkResults, folder: Path) -> None:
    """The time that a tensor takes from process to process."""
    table = results.table("one hop", "size, bytes", "bare gloo, us", "stagepack, us", "ratio")
    for byte_count in HOP_BYTES:
        rounds = 20 if byte_count > 2**20 else 300
        bare_seconds = ring_hop_seconds(byte_count, rounds)
        latencies = []
        for stage_count in HOP_STAGES:
            bundle = export_views(folder / f"views-{stage_count}-{byte_count}.stagepack", stage_count, byte_count)
            with processes(bundle) as pipeline:
                latencies.append(call_seconds(pipeline, torch.zeros(byte_count // 4), rounds))
        seconds = (latencies[1] - latencies[0]) / (HOP_STAGES[1] - HOP_STAGES[0])
        table.add(str(byte_count), bare_seconds * 1e6, seconds * 1e6, seconds / bare_seconds)


def measure_throughput(results: BenchmarkResults, folder: Path) -> None:
    """How many calls a second a compute-bound model answers."""
    torch.manual_seed(0)
    x = torch.randn(BATCH_SIZE, WIDTH)
    out = folder / "layers.stagepack"
    bundle = stagepack.export(Layers().eval(), (x,), out=out, split_at=[f"layers.{LAYERS // 2}"])
    one = stagepack.load(bundle)
    start_time = time.perf_counter()
    with processes(bundle) as pipeline:
        start_seconds = time.perf_counter() - start_time
        private_bytes = {
            facts.stage: private_memory(facts.process_id) - bundle.stages[facts.stage].weight_bytes
            for facts in pipeline.stage_facts
        }
        rates = [throughput(one, pipeline, x) for _ in range(3)]
    table = results.table("throughput", "pipeline", "calls/s", "over one process")
    one_rate = statistics.median(rate for rate, _ in rates)
    two_rate = statistics.median(rate for _, rate in rates)
    table.add("one process, one thread", one_rate, 1.0)
    table.add("two processes, one thread each", two_rate, statistics.median(two / alone for alone, two in rates))
    torch.set_num_threads(2)
    table.add("one process, two threads", call_rate(one, x), call_rate(one, x) / one_rate)
    torch.set_num_threads(1)
    start_table = results.table("start", "what", "value")
    start_table.add("from start to ready, s", start_seconds)
    for stage_number, overhead in private_bytes.items():
        start_table.add(f"private memory of stage {stage_number} beside its weights, MB", overhead / 1e6)


def throughput(one: CallablePipeline, pipeline: DistributedPipeline, x: torch.Tensor) -> tuple[float, float]:
    """Calls a second of both, one after the other."""
    alone_rate = call_rate(one, x)
    start_time = time.perf_counter()
    for answer in [pipeline.submit(x) for _ in range(CALLS)]:
        answer.result()
    return alone_rate, CALLS / (time.perf_counter() - start_time)


def call_rate(pipeline: CallablePipeline, x: torch.Tensor) -> float:
    """Calls a second, one after another."""
    with torch.no_grad():
        return 1 / call_seconds(pipeline, x, CALLS // 2)


def call_seconds(pipeline: CallablePipeline, x: torch.Tensor, rounds: int) -> float:
    """The median time of a call, in seconds."""
    pipeline(x)
    durations = []
    for _ in range(rounds):
        start_time = time.perf_counter()
        pipeline(x)
        durations.append(time.perf_counter() - start_time)
    return statistics.median(durations)


def export_views(out: Path, stage_count: int, byte_count: int) -> Bundle:
    """`Views` with as many stages as steps."""
    split_at = [f"steps.{number}" for number in range(1, stage_count)]
    return stagepack.export(Views(stage_count), (torch.zeros(byte_count // 4),), out=out, split_at=split_at)


@contextmanager
def processes(bundle: Bundle) -> Iterator[DistributedPipeline]:
    """A bundle with a process of one thread for each stage."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with stagepack.load(bundle, processes=True) as pipeline:
        yield pipeline


def ring_hop_seconds(byte_count: int, rounds: int) -> float:
    """The time of a hop of bare gloo: tensors go around a ring."""
    store = open_store()
    context = multiprocessing.get_context("spawn")
    members = [
        context.Process(target=run_ring, args=(store.port, rank, byte_count, rounds)) for rank in range(1, RING_SIZE)
    ]
    for member in members:
        member.start()
    seconds = _ring_seconds(store, 0, byte_count, rounds)
    for member in members:
        member.join()
    return seconds


def run_ring(port: int, rank: int, byte_count: int, rounds: int) -> None:
    """Pass tensors on."""
    torch.set_num_threads(1)
    _ring_seconds(open_store(LOOPBACK, port), rank, byte_count, rounds)


def _ring_seconds(store: Any, rank: int, byte_count: int, rounds: int) -> float:
    group = gloo_process_group(store, rank, RING_SIZE, timedelta(seconds=60), "127.0.0.1")
    memory = torch.zeros(byte_count, dtype=torch.uint8)
    next_rank, previous_rank = (rank + 1) % RING_SIZE, (rank - 1) % RING_SIZE
    durations = []
    for _ in range(rounds + 1):
        start_time = time.perf_counter()
        if rank == 0:
            group.send([memory], next_rank, 1).wait()
        group.recv([memory], previous_rank, 1).wait()
        if rank:
            group.send([memory], next_rank, 1).wait()
        durations.append((time.perf_counter() - start_time) / RING_SIZE)
    return statistics.median(durations[1:])


def private_memory(process_id: int) -> int:
    """The private memory of a process, in bytes."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))


if __name__ == "__main__":
    main()
