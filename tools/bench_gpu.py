"""What a cut costs on one device: ``python -m tools.bench_gpu [cut] [memory] [streams] [text] [serving]``, all of them without a name.

A model of equal transformer blocks in bfloat16 is loaded in 1, 2, 4 and 8 stages on one device. Both sides of each ratio are measured in
one run, in turns; the medians count. ``--device cpu --size tiny`` tries the measurements without a GPU.
"""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.format.reader import Bundle
from tools.benchmark_models import llama
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import medians, seconds_in_turns

STAGE_COUNTS = (1, 2, 4, 8)
WARMUP_CALLS = 3
CLIENTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model and of the measurements."""

    layers: int
    hidden: int
    batch: int
    sequence: int
    calls: int
    serving_seconds: float


SIZES = {
    "full": Sizes(layers=12, hidden=2048, batch=4, sequence=512, calls=30, serving_seconds=5.0),
    "tiny": Sizes(layers=8, hidden=64, batch=2, sequence=8, calls=3, serving_seconds=0.5),
}


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, each with a norm and a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.projections, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, then features."""
        batch, sequence, hidden = x.shape
        heads = self.projections(self.first_norm(x)).view(batch, sequence, 3, -1, 64).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second_norm(x))))


class Bench:
    """The model on the device, its captured program, its bundles and its input."""

    def __init__(self, folder: Path, device: torch.device, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.device, self.sizes, self.folder = device, sizes, folder
        blocks = [Block(sizes.hidden).to(device, torch.bfloat16) for _ in range(sizes.layers)]
        self.model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
        self.x = torch.randn(sizes.batch, sizes.sequence, sizes.hidden, device=device, dtype=torch.bfloat16)
        self.program = torch.export.export(self.model, (self.x,)).module()
        self._bundles: dict[int, Bundle] = {}

    def bundle(self, stage_count: int) -> Bundle:
        """Return the model in some stages, which is written when it is first needed."""
        if stage_count not in self._bundles:
            out = self.folder / f"{stage_count}.stagepack"
            self._bundles[stage_count] = (
                stagepack.export(self.model, (self.x,), out=out, stages=1)
                if stage_count == 1
                else stagepack.recut(self.bundle(1), out=out, stages=stage_count)
            )
        return self._bundles[stage_count]

    def load(self, stage_count: int, **options: Any) -> Any:
        """Return a pipeline on the device."""
        return stagepack.load(self.bundle(stage_count), [str(self.device)], **options)

    def wait(self) -> None:
        """Return when the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, sides: Mapping[str, Callable[[], object]], calls: int | None = None) -> dict[str, float]:
        """Return the median time of a call of each side, which are called in turns."""
        rounds = calls or self.sizes.calls
        return medians(seconds_in_turns(sides, rounds, warm_rounds=WARMUP_CALLS, wait=self.wait))


@torch.no_grad()
def main() -> None:
    """Measure what the command line names."""
    parts: Mapping[str, Callable[[Bench, BenchmarkResults], None]] = {
        "cut": measure_cut,
        "memory": measure_memory,
        "streams": measure_streams,
        "text": measure_text,
        "serving": measure_serving,
    }
    parser = benchmark_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=[*SIZES], default="full")
    options = parser.parse_args()
    device = torch.device(options.device)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder, benchmark_results(options.json, device=device_name) as results:
        bench = Bench(Path(folder), device, SIZES[options.size])
        for part_name in options.parts or parts:
            parts[part_name](bench, results)


def measure_cut(bench: Bench, results: BenchmarkResults) -> None:
    """Calls by number of stages against the captured program: eager, compiled, and as CUDA graphs."""
    eager = {f"{count} stages": _call(bench.load(count), bench.x) for count in STAGE_COUNTS}
    table = results.table(
        f"A call of {bench.sizes.layers} blocks, hidden size {bench.sizes.hidden}, by the number of stages on one device",
        "how",
        "stages",
        "milliseconds",
        "of the captured program",
    )
    program = {"program": _call(bench.program, bench.x)}
    seconds = bench.seconds(program | eager)
    for count in STAGE_COUNTS:
        table.add("eager", count, seconds[f"{count} stages"] * 1e3, seconds[f"{count} stages"] / seconds["program"])
    if bench.device.type == "cuda":
        graphs = {side: cuda_graph(call) for side, call in (program | eager).items()}
        seconds = bench.seconds(graphs)
        for count in STAGE_COUNTS:
            ratio = seconds[f"{count} stages"] / seconds["program"]
            table.add("CUDA graph", count, seconds[f"{count} stages"] * 1e3, ratio)
    compiled = {
        "captured program": _call(torch.compile(bench.program), bench.x),
        "4 stages, each as a whole": _call(bench.load(4, compile="whole"), bench.x),
        "4 stages, by regions": _call(bench.load(4, compile=True), bench.x),
    }
    seconds = bench.seconds(compiled)
    steady = results.table("The same, compiled", "what is compiled", "milliseconds", "of the captured program")
    for side in compiled:
        steady.add(side, seconds[side] * 1e3, seconds[side] / seconds["captured program"])


def measure_memory(bench: Bench, results: BenchmarkResults) -> None:
    """The memory on the device after loading and at the highest point of a call, against the weights."""
    table = results.table(
        "Memory on the device", "stages", "weights, MB", "after loading, of weights", "most in a call, MB"
    )
    for count in STAGE_COUNTS:
        bench.wait()
        before = device_bytes(bench.device)
        pipeline = bench.load(count)
        weight_bytes = sum(stage.weight_bytes for stage in bench.bundle(count).stages)
        loaded = device_bytes(bench.device) - before
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        pipeline(bench.x)
        bench.wait()
        most = device_bytes(bench.device, highest=True) - before - loaded
        table.add(str(count), weight_bytes / 1e6, loaded / weight_bytes, most / 1e6)
        del pipeline


def device_bytes(device: torch.device, *, highest: bool = False) -> int:
    """Return the bytes that tensors have on a GPU, now or at most; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if highest else torch.cuda.memory_allocated(device)


def measure_streams(bench: Bench, results: BenchmarkResults) -> None:
    """Batches through two stages: one after the other, and each stage on a stream of its own."""
    stages = [stagepack.load_stage(bench.bundle(2), number, device=bench.device) for number in range(2)]
    batches = [bench.x.clone() for _ in range(8)]

    def on_one() -> list[torch.Tensor]:
        return [stages[1](*stages[0](batch))[0] for batch in batches]

    sides: dict[str, Callable[[], object]] = {"one stream": on_one}
    if bench.device.type == "cuda":
        sides["two streams"] = lambda: on_two_streams(stages, batches, bench.device)
    seconds = bench.seconds(sides)
    table = results.table("8 batches through two stages on one device", "streams", "milliseconds", "of one stream")
    for side in sides:
        table.add(side, seconds[side] * 1e3, seconds[side] / seconds["one stream"])


def on_two_streams(stages: list[Any], batches: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Run each stage on a stream of its own; the second one takes a batch when the first one has made it."""
    current, streams = torch.cuda.current_stream(device), [torch.cuda.Stream(device) for _ in stages]
    answers = []
    for stream in streams:
        stream.wait_stream(current)
    for batch in batches:
        with torch.cuda.stream(streams[0]):
            (hidden,) = stages[0](batch)
            event = streams[0].record_event()
        with torch.cuda.stream(streams[1]):
            streams[1].wait_event(event)
            hidden.record_stream(streams[1])
            answers.append(stages[1](hidden)[0])
    for stream in streams:
        current.wait_stream(stream)
    return answers


def measure_text(bench: Bench, results: BenchmarkResults) -> None:
    """Tokens per second of a Llama-like decoder in two stages, against ``generate`` of transformers with its dynamic cache."""
    is_tiny = bench.sizes.hidden < 1024
    hidden, layers, positions, prompt, tokens = (64, 2, 64, 8, 8) if is_tiny else (1024, 12, 1024, 64, 64)
    model = llama(
        layers=layers,
        hidden=hidden,
        intermediate=3 * hidden,
        heads=hidden // 16 if is_tiny else 16,
        kv_heads=4,
        vocab_size=4096,
        max_position_embeddings=positions,
    ).to(bench.device, torch.bfloat16)
    table = results.table(
        f"Texts of {prompt} and {tokens} new tokens, Llama of {layers} layers in bfloat16, cache of {positions}",
        "texts",
        "transformers, tokens per second",
        "bundle, tokens per second",
        "of transformers",
    )
    for texts in (1, 4):
        bundle = stagepack.export(
            model, out=bench.folder / f"text-{texts}.stagepack", stages=2, generate=positions, generate_batch=texts
        )
        pipeline = stagepack.load(bundle, [str(bench.device)])
        ids = torch.randint(1, 4096, (texts, prompt), device=bench.device)
        given: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": tokens,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        sides = {
            "transformers": functools.partial(model.generate, ids, **given),
            "bundle": functools.partial(pipeline.generate, ids, **given),
        }
        times = bench.seconds(sides, calls=3)
        rates = {side: texts * tokens / times[side] for side in sides}
        table.add(str(texts), rates["transformers"], rates["bundle"], rates["bundle"] / rates["transformers"])


def measure_serving(bench: Bench, results: BenchmarkResults) -> None:
    """Requests of one row in a second, of 32 clients, with batching and without."""
    torch.manual_seed(0)
    hidden = bench.sizes.hidden
    model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden) for _ in range(bench.sizes.layers))).eval()
    rows = torch.export.Dim("rows", min=1, max=64)
    bundle = stagepack.export(
        model, (torch.randn(2, hidden),), out=bench.folder / "served.stagepack", stages=2, dynamic_shapes=({0: rows},)
    )
    table = results.table(
        f"Requests of one row, {CLIENTS} clients", "largest batch", "requests per second", "of no batching"
    )
    rates = {
        largest: requests_per_second(bundle, str(bench.device), largest, bench.sizes.serving_seconds)
        for largest in (1, 32)
    }
    for largest, rate in rates.items():
        table.add(str(largest), rate, rate / rates[1])


def requests_per_second(bundle: Bundle, device: str, largest: int, seconds: float) -> float:
    """Return how many requests a server answers in a second."""
    options = ("--clients", str(CLIENTS), "--seconds", str(seconds), "--json", "--", "--device", device)
    command = [sys.executable, "-m", "stagepack", "bench", str(bundle.path), *options, "--max-batch", str(largest)]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    throughput: float = measured["throughput"]
    return throughput


def cuda_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that replays the work of another one as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _call(module: Callable[..., object], x: torch.Tensor) -> Callable[[], object]:
    return lambda: module(x)


if __name__ == "__main__":
    main()
