"""Generated text against ``generate`` of transformers with its dynamic cache: a Llama of 12 layers, in two stages, with greedy tokens.

All sides of a ratio take turns in one run, and their tokens have to be equal; in bfloat16 a text is compared up to the first token whose
logit differs from the largest one by rounding. A step is the time from the first new token to the last one, divided by the number of
tokens after the first one; a request is the time of all its tokens. The parts:

- ``decode``: steps by type, batch and prompt; the time to the first token; a step with a large cache against one with a small cache.
- ``server``: requests to a server over REST, by one client and by eight, against one batch of as many texts.
- ``processes``: two stages in a process of one thread each against one process of one thread, eight and sixteen clients.
- ``onnx``: steps with ONNX Runtime.

Usage: ``python -m tools.bench_generate [PART ...] [--quick]``, or all parts without a name. ``--quick`` tries whether all of it runs.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import stagepack
from stagepack.format.reader import Bundle
from tests.serve.servers import Server, post_json, stagepack_server
from tools.benchmark_models import llama
from tools.benchmark_results import ResultTable, benchmark_parser, benchmark_results
from tools.measuring import median_ratio, medians, seconds_in_turns

VOCABULARY: Final = 4096
POSITIONS, TEXTS = 1024, 8  # of the cache
SHORT_PROMPT, LONG_PROMPT = 16, 512
SMALL_CACHE, LARGE_CACHE = 256, 4096
CLIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts share.

    Attributes:
        layers: those of the model.
        steps: the steps of a text whose steps are measured.
        request_tokens: the new tokens of a request.
    """

    folder: Path
    table: ResultTable
    layers: int
    rounds: int
    steps: int
    request_tokens: int
    bundles: dict[tuple[torch.dtype, int, int], Bundle] = field(default_factory=dict)

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """The Llama. No token ends its texts."""
        model = llama(
            layers=self.layers,
            hidden=1024,
            intermediate=2816,
            heads=16,
            kv_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=LARGE_CACHE,
        ).to(dtype)
        model.generation_config.eos_token_id = None
        return model

    def bundle(self, dtype: torch.dtype = torch.float32, positions: int = POSITIONS, texts: int = TEXTS) -> Bundle:
        """The model with a cache of so many texts and positions; exported once."""
        key = dtype, positions, texts
        if key not in self.bundles:
            out = self.folder / f"{str(dtype).removeprefix('torch.')}-{positions}-{texts}.stagepack"
            model = self.model(dtype)
            self.bundles[key] = stagepack.export(model, out=out, stages=2, generate=positions, generate_batch=texts)
        return self.bundles[key]

    def add(self, what: str, seconds: Mapping[str, Sequence[float]], bar: str) -> None:
        """Add the ratio of the first side over the second one, and the median of each."""
        first, second = medians(seconds).values()
        self.table.add(what, 1e3 * first, 1e3 * second, median_ratio(*seconds.values()), bar, ", ".join(seconds))


@dataclass(frozen=True, slots=True)
class TimedText:
    """The tokens of one generation, the time to the first new one, and that of each later one."""

    tokens: torch.Tensor
    first_seconds: float
    step_seconds: float


# Generates with a function that is called at each new token.
Generate = Callable[[Callable[..., None]], torch.Tensor]


def main() -> None:
    """Measure what the command line names."""
    parts: dict[str, Callable[[Bench], None]] = {
        "decode": measure_decode,
        "server": measure_server,
        "processes": measure_processes,
        "onnx": measure_onnx,
    }
    parser = benchmark_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--quick", action="store_true", help="one round of a few tokens, a model of 2 layers")
    options = parser.parse_args()
    layers, rounds, steps, request_tokens = (2, 1, 4, 6) if options.quick else (12, 4, 24, 48)
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        columns = ("what", "first, ms", "second, ms", "first over second", "bar", "first and second")
        title = f"Generation, Llama of {layers} layers, hidden size 1024, median of {rounds}"
        bench = Bench(Path(folder), results.table(title, *columns), layers, rounds, steps, request_tokens)
        for part_name in options.parts or parts:
            parts[part_name](bench)


def make_prompts(batch: int, length: int) -> torch.Tensor:
    """Tokens, [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def measure_decode(bench: Bench) -> None:
    """Steps and first tokens in this process, against transformers; then what a large cache costs a short text."""
    for dtype in (torch.float32, torch.bfloat16):
        model, pipeline = bench.model(dtype), stagepack.load(bench.bundle(dtype))
        type_name = str(dtype).removeprefix("torch.")
        for batch in (1, 4):
            for length in (SHORT_PROMPT, LONG_PROMPT):
                prompts = make_prompts(batch, length)
                sides = {
                    "transformers": by_transformers(model, prompts, bench.steps + 1),
                    "stagepack": by_pipeline(pipeline, prompts, bench.steps + 1),
                }
                texts = texts_in_turns(sides, bench.rounds, model if dtype == torch.bfloat16 else None)
                what = f"{type_name}, {batch} x {length} tokens"
                bench.add(f"step, {what}", step_seconds(texts), "at least 0.95")
                if length == LONG_PROMPT:
                    first = {side: [text.first_seconds for text in texts[side]] for side in reversed(texts)}
                    bench.add(f"first token, {what}", first, "at most 1.1")
    measure_cache(bench)


def measure_cache(bench: Bench) -> None:
    """A step with a cache that is much larger than the text, over one with a small cache."""
    sides = {
        f"{positions:,} positions": by_pipeline(
            stagepack.load(bench.bundle(positions=positions)), make_prompts(1, SHORT_PROMPT), bench.steps + 1
        )
        for positions in (LARGE_CACHE, SMALL_CACHE)
    }
    texts = texts_in_turns(sides, bench.rounds)
    bench.add(f"step, float32, 1 x {SHORT_PROMPT} tokens", step_seconds(texts), "at most 1.1")


def measure_onnx(bench: Bench) -> None:
    """Steps with ONNX Runtime, if it runs all stages."""
    added = stagepack.add_onnx(bench.bundle())
    if added.torch_only:
        print(f"onnx: not measured, stages that run in torch only: {added.torch_only}")
        return
    prompts = make_prompts(4, SHORT_PROMPT)
    sides = {
        "transformers": by_transformers(bench.model(), prompts, bench.steps + 1),
        "ONNX Runtime": by_pipeline(stagepack.load(added.bundle, runtime="onnxruntime"), prompts, bench.steps + 1),
    }
    texts = texts_in_turns(sides, bench.rounds)
    bench.add(f"step, float32, 4 x {SHORT_PROMPT} tokens", step_seconds(texts), "at least 1.0")


def measure_server(bench: Bench) -> None:
    """Requests to a server, against transformers' batch of as many texts. Each side computes on all cores while the other waits."""
    model = bench.model()
    with serve(bench.bundle()) as server:
        for client_count, bar in ((1, "at least 0.9"), (CLIENTS, "at least 0.85")):
            prompts = make_prompts(client_count, SHORT_PROMPT)
            sides = {
                "transformers": lambda prompts=prompts: generated_by(model, prompts, bench.request_tokens),
                "server": lambda prompts=prompts: asked_at_once(server, prompts, bench.request_tokens),
            }
            bench.add(f"requests, float32, {client_count} at once", requests_in_turns(sides, bench), bar)


def measure_processes(bench: Bench) -> None:
    """Requests to a server of two processes, against one of one process; each process has one thread."""
    with ExitStack() as contexts:
        bundle = bench.bundle(texts=2 * CLIENTS)
        one = contexts.enter_context(serve(bundle, "--threads", "1"))
        two = contexts.enter_context(serve(bundle, "--threads", "1", "--processes", "2"))
        for client_count, length, new_tokens, bar in (
            (CLIENTS, SHORT_PROMPT, bench.request_tokens, "at least 1.6"),
            (2 * CLIENTS, SHORT_PROMPT, bench.request_tokens, ""),
            # Bound by arithmetic, and not by reading the weights.
            (CLIENTS, LONG_PROMPT, 2, ""),
        ):
            prompts = make_prompts(client_count, length)
            sides = {
                "process of one thread": functools.partial(asked_at_once, one, prompts, new_tokens),
                "two of them": functools.partial(asked_at_once, two, prompts, new_tokens),
            }
            what = f"requests, float32, {client_count} at once, {length} + {new_tokens} tokens"
            bench.add(what, requests_in_turns(sides, bench), bar)


def texts_in_turns(sides: Mapping[str, Generate], rounds: int, model: Any = None) -> dict[str, list[TimedText]]:
    """Generate by the sides one after the other in each round; the first round does not count. For `model` see `require_equal_tokens`."""
    texts: dict[str, list[TimedText]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, generate in sides.items():
            texts[side].append(timed_text(generate))
    require_equal_tokens({side: side_texts[0].tokens for side, side_texts in texts.items()}, model)
    return {side: side_texts[1:] for side, side_texts in texts.items()}


def timed_text(generate: Generate) -> TimedText:
    """Generate, and note when each token is there."""
    times: list[float] = []
    start_time = time.perf_counter()
    tokens = generate(lambda *_: times.append(time.perf_counter()))
    return TimedText(tokens, times[0] - start_time, (times[-1] - times[0]) / (len(times) - 1))


def step_seconds(texts: Mapping[str, Sequence[TimedText]]) -> dict[str, list[float]]:
    """The seconds of a step of each text, by side."""
    return {side: [text.step_seconds for text in side_texts] for side, side_texts in texts.items()}


def requests_in_turns(sides: Mapping[str, Callable[[], torch.Tensor]], bench: Bench) -> dict[str, list[float]]:
    """Time the requests of the sides, one side after the other in each round."""
    require_equal_tokens({side: ask() for side, ask in sides.items()})
    return seconds_in_turns(sides, bench.rounds)


def require_equal_tokens(tokens: Mapping[str, torch.Tensor], model: Any = None) -> None:
    """Check that all sides have generated the same. With the model, texts may go on in another way where rounding may choose the token."""
    (first_side, expected), *others = tokens.items()
    for side, found in others:
        for row in (found != expected).any(1).nonzero().flatten().tolist():
            position = int((found[row] != expected[row]).nonzero()[0])
            if model is None or not is_tie(model, expected[row, :position], found[row, position]):
                raise AssertionError(f"{side}: expected the tokens of {first_side}, found others in text {row}")


def is_tie(model: Any, text: torch.Tensor, token: torch.Tensor) -> bool:
    """Whether the logit of a next token is the largest one but for rounding, through all layers."""
    with torch.no_grad():
        logits = model(text[None]).logits[0, -1]
    largest = logits.float().max()
    return bool(largest - logits[token] <= 4 * torch.finfo(logits.dtype).eps * largest)


def by_pipeline(pipeline: Any, prompts: torch.Tensor, new_tokens: int) -> Generate:
    """Generate with a bundle."""
    return lambda at_token: torch.as_tensor(pipeline.generate(prompts, max_new_tokens=new_tokens, on_tokens=at_token))


class Streamer:
    """Calls a function at each new token of transformers, which hands on the prompt before them."""

    def __init__(self, at_token: Callable[..., None]) -> None:
        self._next_calls = itertools.chain([lambda: None], itertools.repeat(at_token))

    def put(self, _tokens: torch.Tensor) -> None:
        """Take the next tokens."""
        next(self._next_calls)()

    def end(self) -> None:
        """End the text."""


def by_transformers(model: Any, prompts: torch.Tensor, new_tokens: int) -> Generate:
    """Generate with transformers."""
    return lambda at_token: generated_by(model, prompts, new_tokens, streamer=Streamer(at_token))


def generated_by(model: Any, prompts: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """The tokens of transformers, [batch, length]."""
    mask = torch.ones_like(prompts)
    tokens: torch.Tensor = model.generate(
        prompts, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, do_sample=False, **options
    )
    return tokens


def serve(bundle: Bundle, *options: str) -> Any:
    """A server of the model, in a process of its own."""
    return stagepack_server([f"m={bundle.path}"], *options, is_forked=False)


def asked_at_once(server: Server, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The tokens of as many requests as there are prompts, [batch, length]."""

    def ask(prompt: list[int]) -> list[int]:
        parameters = {"max_tokens": new_tokens, "temperature": 0}
        status, answer = post_json(server, "/v2/models/m/generate", input_ids=prompt, parameters=parameters)
        if status != 200:
            raise AssertionError(f"expected the status 200, found {status}: {answer}")
        return [*prompt, *answer["output_ids"]]

    with ThreadPoolExecutor(len(prompts)) as clients:
        return torch.tensor(list(clients.map(ask, prompts.tolist())))


if __name__ == "__main__":
    main()
