"""An update of a running pipeline by a delta, against a full load of the new bundle, and what it does to requests under way.

Of two versions of one model, some elements differ: of all weights, at random, so that nearly every page changes; or of some layers alone. A
full load maps the new weight files: with a record of verified files it does not hash them; the first load on a machine does. Both sides
end with their first answer. Requests come from threads, one after the other in each; the pause is the longest time between two answers of
one thread, from the begin of the update on.
"""

import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import stagepack
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.weight_files import VERIFIED_FILES_VARIABLE
from tools.benchmark_models import Layers, without_values
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import seconds_of

WIDTH = 4096
_SETTLED_SECONDS = 2.5  # a file younger than that is not recorded
_QUIET_REQUESTS = 10


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="the size of the weights")
    parser.add_argument("--share", type=float, default=0.01, help="the share of the elements that change")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads that send requests")
    parser.add_argument("--folder", type=Path, help="where the bundles are written; by default a temporary folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = make_model(options.gigabytes)
        export(model, folder / "old")
        for kind, change in (("elements of all layers", change_elements), ("some layers", change_layers)):
            with changed(model, change, options.share):
                export(model, folder / "new")
            delta = stagepack.delta(folder / "old", folder / "new", out=folder / "delta")
            time.sleep(_SETTLED_SECONDS)
            title = f"{options.share:.0%} changed: {kind}"
            measure_times(results, title, folder, options.rounds)
            measure_requests(results, title, folder, options.rounds, options.threads)
            for path in (folder / "new", delta.path):
                shutil.rmtree(path)


def make_model(gigabytes: float) -> Layers:
    """A model of bfloat16."""
    layer_count = max(4, round(gigabytes * 1e9 / (WIDTH * WIDTH * 2)))
    model: Layers = without_values(lambda: Layers(layer_count, WIDTH, bias=False, dtype=torch.bfloat16))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    return model


def export(model: Layers, path: Path) -> None:
    """Write a version."""
    stagepack.export(model, (torch.ones(1, WIDTH, dtype=torch.bfloat16),), out=path, stages=2)


@contextmanager
def changed(model: Layers, change: Callable[[Layers, float], None], share: float) -> Iterator[None]:
    """Change the weights of a model for the time of a context."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        with torch.no_grad():
            change(model, share)
        yield
    finally:
        with torch.no_grad():
            for parameter, content in zip(model.parameters(), before, strict=True):
                parameter.copy_(content)


def change_elements(model: Layers, share: float) -> None:
    """Replace elements of all layers, at random."""
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape) < share
        parameter[chosen] = torch.empty(int(chosen.sum()), dtype=parameter.dtype).uniform_(-0.02, 0.02)


def change_layers(model: Layers, share: float) -> None:
    """Replace layers, at least one."""
    for layer in list(model.layers)[: max(1, round(share * len(model.layers)))]:
        layer.weight.uniform_(-0.02, 0.02)  # type: ignore[operator]


def measure_times(results: BenchmarkResults, title: str, folder: Path, rounds: int) -> None:
    """Compare an update with loads of the new bundle, in turns."""
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    stagepack.load(folder / "new")(x)
    sides: dict[str, list[float]] = {"load, with record": [], "load, first on this machine": [], "update": []}
    parts: list[dict[str, float]] = []

    def load_and_answer() -> None:
        stagepack.load(folder / "new")(x)

    for _ in range(rounds):
        sides["load, with record"].append(seconds_of(load_and_answer))
        os.environ[VERIFIED_FILES_VARIABLE] = ""
        sides["load, first on this machine"].append(seconds_of(load_and_answer))
        del os.environ[VERIFIED_FILES_VARIABLE]
        pipeline = stagepack.load(folder / "old")
        pipeline(x)

        def update(pipeline: Pipeline = pipeline) -> None:
            parts.append(pipeline.update(folder / "delta").seconds)
            pipeline(x)

        sides["update"].append(seconds_of(update))
    table = results.table(f"{title}: until the first answer", "what", "time, s", "to the load with record")
    base = statistics.median(sides["load, with record"])
    for side, seconds in sides.items():
        table.add(side, statistics.median(seconds), statistics.median(seconds) / base)
    for part in parts[0]:
        part_seconds = statistics.median(each[part] for each in parts)
        table.add(f"update: {part}", part_seconds, part_seconds / base)


def measure_requests(results: BenchmarkResults, title: str, folder: Path, rounds: int, threads: int) -> None:
    """Send requests while a pipeline is updated."""
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    quiet, busy, failures = list[float](), list[float](), list[str]()

    def call(pipeline: Pipeline, own_times: list[float], has_ended: threading.Event) -> None:
        while not has_ended.is_set():
            try:
                pipeline(x)
            except Exception as error:  # noqa: BLE001 - counted
                failures.append(repr(error))
            own_times.append(time.perf_counter())

    for _ in range(rounds):
        pipeline, has_ended = stagepack.load(folder / "old", copy=True), threading.Event()
        times: list[list[float]] = [[] for _ in range(threads)]
        with torch.no_grad():
            workers = [threading.Thread(target=call, args=(pipeline, own_times, has_ended)) for own_times in times]
            for worker in workers:
                worker.start()
            _await_requests(times, _QUIET_REQUESTS)
            quiet_end = time.perf_counter()
            pipeline.update(folder / "delta")
            _await_requests(times, max(map(len, times)) + 2)
            has_ended.set()
            for worker in workers:
                worker.join()
        for own_times in times:
            gaps = [(end, end - start) for start, end in itertools.pairwise(own_times[1:])]
            quiet += [gap for end, gap in gaps if end < quiet_end]
            busy += [gap for end, gap in gaps if end >= quiet_end]
    table = results.table(f"{title}: requests of {threads} threads", "what", "without updates", "during updates")
    table.add("median request, ms", 1e3 * statistics.median(quiet), 1e3 * statistics.median(busy))
    table.add("longest pause, ms", 1e3 * max(quiet), 1e3 * max(busy))
    table.add(
        "longest pause, in median requests", max(quiet) / statistics.median(quiet), max(busy) / statistics.median(quiet)
    )
    table.add("requests that failed", 0, len(failures))


def _await_requests(times: Sequence[Sequence[float]], count: int) -> None:
    """Wait until each thread has so many answers."""
    while min(map(len, times)) < count:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
