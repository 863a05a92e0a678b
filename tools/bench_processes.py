"""Stages in processes of their own: throughput against one process, hand-written torch.distributed code and Triton; time to start; memory.

The model has two equal stages; each process has one thread. `CALLS` calls are submitted at once, so the bubble limits the throughput to
twice `CALLS / (CALLS + 1)` times that of one process. The hand-written code sends tensors of one fixed shape through the same modules,
with two receives posted ahead. Triton runs the ensemble that ``stagepack triton`` writes, whose stages are in processes of their own,
against ``stagepack serve --processes 2`` with the same client: as it starts by itself, where each stage computes on all cores, and with the
variable that gives each stage one thread, which ``serve`` does by itself. The servers are there at once, and are asked in turns.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import tritonclient.grpc.aio
import tritonclient.http.aio

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.pipeline import CallablePipeline
from tests.serve.servers import STAGEPACK, stagepack_server, triton_server, why_no_triton
from tools.benchmark_models import Layers
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.gloo_rings import join_ring, started_members
from tools.measuring import answers_per_second, median_ratio, median_seconds

LAYERS, WIDTH, BATCH_SIZE = 12, 1024, 128
CALLS = 60
REPETITIONS = 7
CLIENTS = 8
SERVER_SECONDS = 3.0
SERVER_TURNS = 9


def main() -> None:
    """Measure, and print the figures."""
    options = benchmark_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        bundle = export_layers(Path(folder))
        measure_throughput(results, bundle)
        measure_servers(results, bundle, Path(folder))


def export_layers(folder: Path) -> Bundle:
    """`Layers` in two equal stages."""
    torch.manual_seed(0)
    x = torch.randn(BATCH_SIZE, WIDTH)
    out = folder / "layers.stagepack"
    return stagepack.export(Layers(LAYERS, WIDTH).eval(), (x,), out=out, split_at=[f"layers.{LAYERS // 2}"])


def measure_throughput(results: BenchmarkResults, bundle: Bundle) -> None:
    """How many calls a second a compute-bound model answers, how long its processes take to start, and their memory."""
    x = torch.randn(BATCH_SIZE, WIDTH)
    one = stagepack.load(bundle)
    start_time = time.perf_counter()
    with processes(bundle) as pipeline:
        start_seconds = time.perf_counter() - start_time
        private_bytes = {
            facts.stage: private_memory(facts.process_id) - bundle.stages[facts.stage].weight_bytes
            for facts in pipeline.stage_facts
        }
        rates = [(*throughput(one, pipeline, x), hand_written_rate()) for _ in range(REPETITIONS)]
    one_rates, own_rates, hand_written_rates = zip(*rates, strict=True)
    one_rate = statistics.median(one_rates)
    limit = 2 * CALLS / (CALLS + 1)
    table = results.table("throughput", "pipeline", "calls/s", "over one process", "over the bubble limit")
    table.add("one process, one thread", one_rate, 1.0, "")
    for title, side_rates in (
        ("two processes, one thread each", own_rates),
        ("hand-written, one thread each", hand_written_rates),
    ):
        ratio = median_ratio(side_rates, one_rates)
        table.add(title, statistics.median(side_rates), ratio, ratio / limit)
    torch.set_num_threads(2)
    table.add("one process, two threads", call_rate(one, x), call_rate(one, x) / one_rate, "")
    torch.set_num_threads(1)
    start_table = results.table("start", "what", "value")
    start_table.add("from start to ready, s", start_seconds)
    start_table.add("an empty process with torch, private memory, MB", empty_memory() / 1e6)
    for stage_number, overhead in private_bytes.items():
        start_table.add(f"private memory of stage {stage_number} beside its weights, MB", overhead / 1e6)


def measure_servers(results: BenchmarkResults, bundle: Bundle, folder: Path) -> None:
    """How many requests a second servers answer that run each stage in a process of its own."""
    columns = ("server", "protocol", "answers/s, median", "stagepack over it, median of turns")
    table = results.table("servers, 8 clients", *columns)
    if reason := why_no_triton():
        print(reason)
        return
    repository = folder / "repository"
    subprocess.run([STAGEPACK, "triton", str(bundle.path), "-o", str(repository)], check=True, capture_output=True)
    with ExitStack() as contexts:
        with thread_variable(None):
            own_server = contexts.enter_context(stagepack_server([bundle.path], "--processes", "2", "--max-batch", "1"))
        servers = {"stagepack serve --processes 2": own_server}
        for title, thread_count in (("Triton, ensemble", None), ("Triton, ensemble, OMP_NUM_THREADS=1", "1")):
            scratch = folder / f"triton-{thread_count}"
            scratch.mkdir()
            with thread_variable(thread_count):
                servers[title] = contexts.enter_context(triton_server(repository, scratch))
        rates: dict[tuple[str, str], list[float]] = {}
        for _ in range(SERVER_TURNS):
            for title, server in servers.items():
                for protocol, module, port in (
                    ("gRPC", tritonclient.grpc.aio, server.grpc),
                    ("REST", tritonclient.http.aio, server.http),
                ):
                    rates.setdefault((title, protocol), []).append(asyncio.run(answer_rate(module, port)))
    for (title, protocol), turns in rates.items():
        own_turns = rates["stagepack serve --processes 2", protocol]
        table.add(title, protocol, statistics.median(turns), median_ratio(own_turns, turns))


@contextmanager
def thread_variable(thread_count: str | None) -> Iterator[None]:
    """Start programs with so many threads of OpenMP; None for as many as there are cores."""
    variables = {} if thread_count is None else {"OMP_NUM_THREADS": thread_count}
    earlier_count = os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(variables)
    yield
    os.environ.pop("OMP_NUM_THREADS", None)
    if earlier_count is not None:
        os.environ["OMP_NUM_THREADS"] = earlier_count


async def answer_rate(module: Any, port: int) -> float:
    """The answers a second of the model `layers` to `CLIENTS` requests at a time, over gRPC, or over REST with tensors as bytes."""
    x = numpy.ones((BATCH_SIZE, WIDTH), dtype=numpy.float32)
    inputs = [module.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)]
    async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        await client.infer("layers", inputs)
        return await answers_per_second(lambda: client.infer("layers", inputs), CLIENTS, SERVER_SECONDS)


def hand_written_rate() -> float:
    """Calls a second of the same layers in two processes, by code that sends tensors of one shape."""
    x = torch.randn(BATCH_SIZE, WIDTH)
    with started_members(run_hand_written_stage, [(rank,) for rank in (1, 2)]) as group:
        results = [torch.empty(BATCH_SIZE, WIDTH) for _ in range(CALLS + 1)]
        receives = [group.recv([result], 2, 1) for result in results]
        group.send([x], 1, 1).wait()
        receives[0].wait()
        start_time = time.perf_counter()
        sends = [group.send([x], 1, 1) for _ in range(CALLS)]
        for receive in receives[1:]:
            receive.wait()
        seconds = time.perf_counter() - start_time
        for send in sends:
            send.wait()
    return CALLS / seconds


@torch.no_grad()
def run_hand_written_stage(port: int, rank: int) -> None:
    """Half of the layers, in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = Layers(LAYERS, WIDTH).eval().layers[(rank - 1) * LAYERS // 2 : rank * LAYERS // 2]
    group = join_ring(port, rank, 3)
    buffers = [torch.empty(BATCH_SIZE, WIDTH) for _ in range(2)]
    receives = [group.recv([buffer], rank - 1, 1) for buffer in buffers]
    sends = []
    for number in range(CALLS + 1):
        receives[number % 2].wait()
        x = buffers[number % 2]
        for layer in layers:
            x = layer(x).relu()
        sends.append(group.send([x], (rank + 1) % 3, 1))
        if number + 2 <= CALLS:
            receives[number % 2] = group.recv([buffers[number % 2]], rank - 1, 1)
    for send in sends:
        send.wait()


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
        return 1 / median_seconds(lambda: pipeline(x), CALLS // 2)


@contextmanager
def processes(bundle: Bundle) -> Iterator[DistributedPipeline]:
    """A bundle with a process of one thread for each stage."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with stagepack.load(bundle, processes=True) as pipeline:
        yield pipeline


def empty_memory() -> int:
    """The private memory of a process that has imported torch, in bytes."""
    program = "import sys, torch; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return private_memory(process.pid)


def private_memory(process_id: int) -> int:
    """The private memory of a process, in bytes."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))


if __name__ == "__main__":
    main()
