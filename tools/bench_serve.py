"""Measure `stagepack serve`: what it adds to a call, what batching gains, and whether it stands a load and a rolling stop.

Each part runs servers as processes of their own and `tritonclient` here; both sides of a ratio are measured in one run.
Usage: ``python -m tools.bench_serve [overhead] [batching] [load] [--processes N]``, or all three without a name.
"""

import asyncio
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

import stagepack
from tests.serve.servers import Client, Server, stagepack_server
from tests.zoo.architectures.encoders import minilm_encoder_folder
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import answers_per_second, median_seconds

SECONDS, CONNECTIONS = 60, 32
MANY = [(batch, length) for batch in range(1, 5) for length in range(4, 40)]  # rows and tokens of a request
SENTENCE = numpy.array(
    [[101, 1037, 4937, 7719, 2006, 1996, 13523, 1012, 102]]
)  # "A cat sits on the mat.", as MiniLM reads it


class AddOne(torch.nn.Module):
    """Next to nothing to compute, so that what is measured is the server."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Add one."""
        return {"y": x + 1}


def main() -> None:
    """Measure what the command line names."""
    parts: Mapping[str, Callable[[Path, BenchmarkResults, int], None]] = {
        "overhead": lambda folder, results, _: overhead(folder, results),
        "batching": lambda folder, results, _: batching(folder, results),
        "load": load,
    }
    parser = benchmark_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--processes", type=int, default=1, help="under load, the processes of each server's stages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, benchmark_results(options.json) as results:
        for part_name in options.parts or parts:
            parts[part_name](Path(folder), results, options.processes)


def overhead(folder: Path, results: BenchmarkResults) -> None:
    """What a request costs beyond the call of the pipeline in this process: medians."""
    rows = torch.export.Dim("rows", min=1, max=1 << 23)
    bundle = folder / "add.stagepack"
    stagepack.export(AddOne(), (torch.ones(4, 4),), out=bundle, stages=1, dynamic_shapes={"x": {0: rows}})
    pipe = stagepack.load(bundle)
    # The threads of this process, which the clients share, are not to wait for work on the cores.
    torch.set_num_threads(1)
    table = results.table(
        "Time of a request beyond the same call in this process", "request", "protocol", "beyond, ms", "in process, ms"
    )
    with stagepack_server([bundle], "--max-batch", "1") as server:
        for shape, calls, unit in (((4, 4), 1000, "small"), ((2_000_000, 4), 15, "32 MB in and out")):
            x = numpy.random.default_rng(0).random(shape, dtype="float32")
            with torch.no_grad():
                local_seconds = median_seconds(lambda: pipe(torch.from_numpy(x))["y"].numpy(), calls)  # noqa: B023 - called at once
            for protocol in ("http", "grpc"):
                with Client(protocol, server) as client:
                    served_seconds = median_seconds(lambda: client.ask("add", {"x": x}, outputs=["y"]), calls)  # noqa: B023 - the same
                table.add(unit, protocol, 1e3 * (served_seconds - local_seconds), 1e3 * local_seconds)


def batching(folder: Path, results: BenchmarkResults) -> None:
    """64 clients with one row each: answers in a second, with batching and without."""
    bundle = _minilm(folder)
    rates: dict[str, list[float]] = {"1": [], "64": []}
    for rows in ("1", "64", "1", "64"):
        with stagepack_server([bundle], "--max-batch", rows) as server:
            asyncio.run(_answer_rate(server.grpc, 3.0))
            rates[rows].append(asyncio.run(_answer_rate(server.grpc, 10.0)))
    table = results.table("64 clients, one sentence each (MiniLM)", "--max-batch", "answers a second, run 1", "run 2")
    for rows, runs in rates.items():
        table.add(rows, *runs)
    table.add("on over off (best runs)", max(rates["64"]) / max(rates["1"]), "")


async def _answer_rate(port: int, seconds: float) -> float:
    """The answers a second to 64 requests at a time over gRPC."""
    inputs = _inputs(tritonclient.grpc, SENTENCE)
    outputs = [tritonclient.grpc.InferRequestedOutput("pooler_output")]
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return await answers_per_second(lambda: client.infer("minilm", inputs, outputs=outputs), 64, seconds)


def _inputs(module: Any, ids: numpy.ndarray[Any, Any]) -> list[Any]:
    """Tokens as inputs of a request."""
    arrays = {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}
    return [
        module.InferInput(name, list(array.shape), "INT64").set_data_from_numpy(array) for name, array in arrays.items()
    ]


def _minilm(folder: Path, stages: int = 2) -> Path:
    """The published MiniLM, in two stages by default."""
    bundle = folder / f"{stages}-stages" / "minilm.stagepack"
    if not bundle.exists():
        bundle.parent.mkdir()
        stagepack.export(minilm_encoder_folder(), out=bundle, stages=stages)
    return bundle


def load(folder: Path, results: BenchmarkResults, processes: int) -> None:
    """A minute of requests on 32 connections, half of them REST, of one size and of many; then a rolling stop under such a load."""
    bundle = _minilm(folder, max(2, processes))
    options = ("--processes", str(processes)) if processes > 1 else ()
    suffix = f", {processes} processes" if processes > 1 else ""
    table = results.table(
        f"{SECONDS} s on {CONNECTIONS} connections{suffix}",
        "requests",
        "answers",
        "errors",
        "memory after 10 s, MB",
        "memory at the end, MB",
        "growth, %",
    )
    for request_kind, sizes in (("one size", [SENTENCE.shape]), ("many sizes", MANY)):
        memory: list[int] = []
        with stagepack_server([bundle], *options) as server:
            tally = asyncio.run(_storm([server], sizes, SECONDS, lambda: memory.append(server.memory())))  # noqa: B023 - called at once
        after, end = memory[10], statistics.median(memory[-5:])
        table.add(request_kind, tally.answered[0], len(tally.errors), after / 1e6, end / 1e6, 100 * (end / after - 1))
    _rolling_stop(bundle, options, suffix, results)


def _rolling_stop(bundle: Path, options: Sequence[str], suffix: str, results: BenchmarkResults) -> None:
    """Stop one of two servers under load, and count what became of the requests."""
    with stagepack_server([bundle], *options) as old, stagepack_server([bundle], *options) as new:
        stop = threading.Timer(5, lambda: old.process.send_signal(signal.SIGTERM))
        stop.start()
        tally = asyncio.run(_storm([old, new], MANY, 15, lambda: None))
        assert old.process.wait(timeout=30) == 0
        counted = old.answers()
    table = results.table(f"Rolling stop under load{suffix}", "measure", "requests")
    table.add("answered by the old server", counted.get("OK", 0))
    table.add("of these, arrived", tally.answered[0])
    table.add("answered by the new server", tally.answered[1])
    table.add("refused or closed before they were accepted, and sent again", tally.moved)
    table.add("other errors", len(tally.errors))
    for error in tally.errors[:5]:
        print(repr(error))


@dataclass(slots=True)
class _Tally:
    """What clients saw: answers of each server, requests they had to ask of the next one, and errors."""

    answered: list[int]
    moved: int = 0
    errors: list[Exception] = field(default_factory=list)


async def _storm(
    servers: list[Server], sizes: list[tuple[int, int]], seconds: float, each_second: Callable[[], None]
) -> _Tally:
    """Ask the first server over 32 connections, and the next one once it takes no more."""
    tally, until = _Tally([0] * len(servers)), time.perf_counter() + seconds
    rng = numpy.random.default_rng(0)

    async def ask(module: Any) -> None:
        turn = 0
        client = _client(module, servers[turn])
        while time.perf_counter() < until:
            shape = sizes[rng.integers(len(sizes))]
            inputs = _inputs(module, rng.integers(1, 3000, shape))
            try:
                answer = await client.infer("minilm", inputs, outputs=[module.InferRequestedOutput("pooler_output")])
                assert answer.as_numpy("pooler_output").shape == (shape[0], 384)
                tally.answered[turn] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                if turn + 1 == len(servers):
                    tally.errors.append(error)
                    return
                await client.close()
                turn, tally.moved = turn + 1, tally.moved + 1
                client = _client(module, servers[turn])
        await client.close()

    async def watch() -> None:
        while time.perf_counter() < until:
            each_second()
            await asyncio.sleep(1)

    modules = [(tritonclient.http.aio, tritonclient.grpc.aio)[number % 2] for number in range(CONNECTIONS)]
    await asyncio.gather(watch(), *map(ask, modules))
    return tally


def _client(module: Any, server: Server) -> Any:
    """A client with a connection of its own."""
    port = server.http if module is tritonclient.http.aio else server.grpc
    options = {} if module is tritonclient.http.aio else {"channel_args": [("grpc.use_local_subchannel_pool", 1)]}
    return module.InferenceServerClient(f"127.0.0.1:{port}", **options)


if __name__ == "__main__":
    main()
