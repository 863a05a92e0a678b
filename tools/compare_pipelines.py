"""Generated tokens of two processes under torchrun, against the pipeline of transformers: a Llama of 12 layers, gloo, one thread each.

Both sides are started once and take turns; a turn is the time from the first new token to the last one, and the tokens of both sides are
equal. On a machine that does other things, the processor time of all processes in a turn says more than the clock. transformers asks for
``accelerate`` here.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import torch

import stagepack
from stagepack_loaders.distributed.process_group import LOOPBACK, open_store
from tools.benchmark_models import llama
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import median_ratio, memory_of_status

VOCABULARY, PROMPT, POSITIONS = 4096, 16, 1024
SIDES: Final = ("transformers", "stagepack")
_TICKS = os.sysconf("SC_CLK_TCK")
# Generates for prompts, and returns the tokens.
Generate = Callable[[torch.Tensor, int], torch.Tensor]


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--member", nargs=3, metavar=("SIDE", "FOLDER", "PORT"), help="used by the tool itself")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    if options.member is not None:
        side, folder, port = options.member
        _MEMBERS[side](Path(folder), open_store(LOOPBACK, int(port)))
        return
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder, ExitStack() as contexts:
        write_models(Path(folder), max(options.batches))
        store = open_store(LOOPBACK)
        starts = results.table(
            f"start and memory, {os.cpu_count()} cores", "side", "ready after, s", "memory of rank 1, MB"
        )
        sides = {side: contexts.enter_context(StartedSide(side, Path(folder), store)) for side in SIDES}
        for side, started in sides.items():
            starts.add(side, started.start_seconds, memory_of_status("RssAnon", started.processes[1]) / 1e6)
        columns = ("texts", "transformers, tokens/s", "stagepack", "stagepack over it", "processor time over it")
        table = results.table(f"generated tokens, median of {options.rounds} turns", *columns)
        for batch in options.batches:
            turns = [
                [started.turn(batch, options.tokens) for started in sides.values()] for _ in range(1 + options.rounds)
            ]
            assert all(theirs["tokens"] == ours["tokens"] for theirs, ours in turns)
            theirs, ours = ([turn[number] for turn in turns[1:]] for number in range(2))
            rates = [[batch * options.tokens / turn["seconds"] for turn in side_turns] for side_turns in (theirs, ours)]
            used = [[turn["processor"] for turn in side_turns] for side_turns in (ours, theirs)]
            medians = map(statistics.median, rates)
            table.add(batch, *medians, median_ratio(*reversed(rates)), median_ratio(*used))


def write_models(folder: Path, texts: int) -> None:
    """Write the model as a checkpoint, and as a bundle that is cut by layers."""
    sizes = {"hidden": 1024, "intermediate": 2816, "heads": 16, "kv_heads": 4}
    model = llama(layers=12, **sizes, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS)
    model.generation_config.eos_token_id = None
    # With weights as small as those of the layers, each text repeats one token.
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder / "model")
    out = folder / "model.stagepack"
    stagepack.export(model, out=out, stages="layers", generate=POSITIONS, generate_batch=texts)


class StartedSide:
    """The two processes of a side."""

    def __init__(self, side: str, folder: Path, store: Any) -> None:
        self._side, self._folder, self._store = side, folder, store
        self._turn_count = 0
        self.start_seconds = 0.0
        self.processes: list[int] = []

    def __enter__(self) -> Self:
        begin = time.perf_counter()
        member = [*("-m", "tools.compare_pipelines", "--member", self._side, str(self._folder), str(self._store.port))]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *member]
        self._process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self._store.wait([f"{self._side}/ready"])
        self.start_seconds = time.perf_counter() - begin
        self.processes = [int(self._store.get(f"{self._side}/process/{rank}")) for rank in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ask({})
        self._process.wait()

    def turn(self, batch: int, tokens: int) -> dict[str, Any]:
        """Have it generate, and return the tokens and the seconds, those of the processors too, of all tokens but the first."""
        self._ask({"batch": batch, "tokens": 1})
        first_used = self._processor_seconds()
        first = json.loads(self._store.get(f"{self._side}/done/{self._turn_count}"))
        used = self._processor_seconds()
        self._ask({"batch": batch, "tokens": tokens + 1})
        found = json.loads(self._store.get(f"{self._side}/done/{self._turn_count}"))
        processor = (self._processor_seconds() - used) - (used - first_used)
        return {"tokens": found["tokens"], "seconds": found["seconds"] - first["seconds"], "processor": processor}

    def _ask(self, request: dict[str, int]) -> None:
        self._turn_count += 1
        self._store.set(f"{self._side}/turn/{self._turn_count}", json.dumps(request))

    def _processor_seconds(self) -> float:
        fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in self.processes]
        return sum(int(user) + int(system) for *_, user, system in (row[:13] for row in fields)) / _TICKS


def serve_turns(side: str, rank: int, store: Any, generate: Generate) -> None:
    """Generate until the parent says that it is enough."""
    turn_number = 0
    while True:
        turn_number += 1
        store.wait([f"{side}/turn/{turn_number}"])
        turn = json.loads(store.get(f"{side}/turn/{turn_number}"))
        if not turn:
            return
        shape = (turn["batch"], PROMPT)
        prompts = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(turn["batch"]))
        begin = time.perf_counter()
        tokens = generate(prompts, turn["tokens"])
        if rank == 0:
            answer = {"seconds": time.perf_counter() - begin, "tokens": tokens.tolist()}
            store.set(f"{side}/done/{turn_number}", json.dumps(answer))


def _report(side: str, store: Any) -> int:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    store.set(f"{side}/process/{rank}", str(os.getpid()))
    return rank


def run_stagepack(folder: Path, store: Any) -> None:
    """One of our processes."""
    rank = _report("stagepack", store)
    pipeline = stagepack.distributed.connect(folder / "model.stagepack")
    if pipeline is not None:
        with pipeline:
            store.set("stagepack/ready", "")
            serve_turns(
                "stagepack", rank, store, lambda prompts, count: pipeline.generate(prompts, max_new_tokens=count)
            )


def run_transformers(folder: Path, store: Any) -> None:
    """One of the processes of transformers."""
    import transformers  # noqa: PLC0415 - only this side needs it
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415 - the same

    rank = _report("transformers", store)
    parallel = DistributedConfig(pp_size=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=parallel, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    torch.distributed.barrier()
    if rank == 0:
        store.set("transformers/ready", "")

    def generate(prompts: torch.Tensor, count: int) -> torch.Tensor:
        mask = torch.ones_like(prompts)
        tokens: torch.Tensor = model.generate(
            prompts, attention_mask=mask, max_new_tokens=count, pad_token_id=0, do_sample=False
        )
        return tokens

    serve_turns("transformers", rank, store, generate)
    torch.distributed.destroy_process_group()


_MEMBERS: Final = {"transformers": run_transformers, "stagepack": run_stagepack}


if __name__ == "__main__":
    main()
