"""The throughput of two processes against what the placement expects of it: of one thread each, and of a whole and half a processor.

Each turn measures the times of the operators in this process, places the stages by them, and counts the calls that come out. Half a
processor is a process that is stopped half of each 0.1 s, as a control group with such a quota stops it. The processor time of a call in
the slowest process is what the throughput is without other work on the machine.
"""

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import stagepack
from stagepack.cli.profile_command import make_profile
from stagepack.format.reader import Bundle
from stagepack.partition.placement import Placement, place
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.torch.measurement import measure_bundle
from tools.benchmark_models import Layers
from tools.benchmark_results import benchmark_parser, benchmark_results

LAYERS, WIDTH, ROWS = 24, 1024, 32
CALLS, RUNS = 60, 15
_PERIOD_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_PICOSECONDS = 1e12  # in a second


def main() -> None:
    """Measure, and print the figures."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = ("processors", "stages", "expected, calls/s", "found", "found over expected", "by processor time")
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        x, out = torch.randn(ROWS, WIDTH), Path(folder) / "layers.stagepack"
        bundle = stagepack.export(Layers(LAYERS, WIDTH).eval(), (x,), out=out, stages=LAYERS)
        table = results.table(f"two processes of one thread, median of {options.rounds} turns", *columns)
        for shares in ((1.0, 1.0), (1.0, 0.5)):
            placement = placed(bundle, shares)
            counts = placement.stages_per_device
            with stagepack.load(bundle, processes=2, stages_per_device=counts) as pipeline:
                turns = [turn(bundle, pipeline, shares, counts, x) for _ in range(options.rounds)]
            expected, found, by_processor = zip(*turns, strict=True)
            ratios = [
                [rate / planned for rate, planned in zip(rates, expected, strict=True)]
                for rates in (found, by_processor)
            ]
            medians = map(statistics.median, (expected, found, *ratios))
            table.add(" and ".join(f"{share:g}" for share in shares), " and ".join(map(str, counts)), *medians)


def placed(bundle: Bundle, shares: Sequence[float], counts: Sequence[int] | None = None) -> Placement:
    """The placement by times that are measured now."""
    profile = make_profile(bundle, measure_bundle(bundle, runs=RUNS), RUNS)
    devices = [TargetDevice(name="cpu", speed=share, profile=profile) for share in shares]
    return place(bundle.entry_point, devices, files=bundle.files.values(), stages_per_device=counts)


def turn(
    bundle: Bundle, pipeline: DistributedPipeline, shares: Sequence[float], counts: Sequence[int], x: torch.Tensor
) -> tuple[float, float, float]:
    """The calls a second that are expected, those that come out, and those that the processor time of the slowest process allows."""
    expected = _PICOSECONDS / placed(bundle, shares, counts).interval
    processes = [facts.process_id for facts in pipeline.stage_facts]
    with stopped_in_part(processes, shares):
        pipeline(x)
        used, begin = [processor_seconds(process) for process in processes], time.perf_counter()
        for answer in [pipeline.submit(x) for _ in range(CALLS)]:
            answer.result()
        seconds = time.perf_counter() - begin
        used = [processor_seconds(process) - before for process, before in zip(processes, used, strict=True)]
    # Without the calls in which the pipeline fills.
    rate = (CALLS - 1) / seconds
    return expected, rate, CALLS / max(process_used / share for process_used, share in zip(used, shares, strict=True))


@contextmanager
def stopped_in_part(processes: Sequence[int], shares: Sequence[float]) -> Iterator[None]:
    """Stop each process for the part of the time that it does not have."""
    has_ended = threading.Event()
    limited = [(process, share) for process, share in zip(processes, shares, strict=True) if share < 1]

    def stop_and_continue(process: int, share: float) -> None:
        while not has_ended.is_set():
            os.kill(process, signal.SIGSTOP)
            time.sleep(_PERIOD_SECONDS * (1 - share))
            os.kill(process, signal.SIGCONT)
            has_ended.wait(_PERIOD_SECONDS * share)

    threads = [threading.Thread(target=stop_and_continue, args=arguments) for arguments in limited]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def processor_seconds(process: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    main()
