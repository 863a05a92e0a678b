"""A training step: `stagepack.train` against hand-written `torch.distributed.pipelining.PipelineStage` code on the same stages.

Two processes of one thread each, over gloo on loopback. The hand-written code has fixed shapes and stages written as modules; both run
`Schedule1F1B` with equal microbatches, on equal weights, and take turns in one run: blocks of `STEPS` steps, first one side, then the
other. A step is forward and backward, without an optimizer.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import stagepack
from tools.benchmark_models import Layers
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import median_ratio, seconds_in_turns

MICROBATCHES = 8
STEPS = 5
BLOCKS = 11
PROCESSES = 2


class Encoder(torch.nn.Module):
    """A transformer over vectors: many small operators."""

    def __init__(self, layers: int = 6, width: int = 256) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
        title: what the table calls it.
        make: makes it.
        batch_shape: the shape of the input and of the target.
    """

    title: str
    make: Callable[[], Layers | Encoder]
    batch_shape: tuple[int, ...]


MODELS: Sequence[Model] = (
    Model(title="12 linear layers of 1024, 8 x 32 rows", make=partial(Layers, 12, 1024), batch_shape=(256, 1024)),
    Model(title="fixed costs: 12 linear layers of 64, 8 x 4 rows", make=partial(Layers, 12, 64), batch_shape=(32, 64)),
    Model(title="6 transformer layers of 256, 8 x 2 x 64 tokens", make=Encoder, batch_shape=(16, 64, 256)),
)


class HandWrittenHalf(torch.nn.Module):
    """Half of the layers."""

    def __init__(self, model: Layers | Encoder, rank: int) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.layers = model.layers[rank * half : (rank + 1) * half]
        self.has_activation = isinstance(model, Layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x).relu() if self.has_activation else layer(x)
        return x


def main() -> None:
    """Measure, and print the figures."""
    options = benchmark_parser(__doc__).parse_args()
    with benchmark_results(options.json) as results, tempfile.TemporaryDirectory() as folder:
        table = results.table(
            "training step, two processes",
            "model",
            "stagepack, ms",
            "hand-written, ms",
            "median ratio",
            "worst gradient",
        )
        for number, model in enumerate(MODELS):
            bundle_path = Path(folder) / f"{number}.stagepack"
            torch.manual_seed(0)
            made = model.make()
            rows = model.batch_shape[0] // MICROBATCHES
            x = torch.randn(rows, *model.batch_shape[1:])
            stagepack.export(made, (x,), out=bundle_path, split_at=[f"layers.{len(made.layers) // 2}"])
            ours, theirs, difference = measure(number, bundle_path, Path(folder))
            milliseconds = [1000 * statistics.median(seconds) for seconds in (ours, theirs)]
            table.add(model.title, *milliseconds, median_ratio(ours, theirs), difference)


def measure(model_number: int, bundle_path: Path, folder: Path) -> tuple[list[float], list[float], float]:
    """Return the seconds of a step in each block of both sides, and the largest relative difference of their gradients."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    store = folder / f"store-{model_number}"
    processes = [
        context.Process(target=run_rank, args=(rank, model_number, bundle_path, store, sender))
        for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    sender.close()
    answers = [receiver.recv() for _ in processes]
    for process in processes:
        process.join()
    ours, theirs, _ = next(answer for answer in answers if answer[0])
    return ours, theirs, max(answer[2] for answer in answers)


def run_rank(rank: int, model_number: int, bundle_path: Path, store: Path, sender: Connection) -> None:
    """Train one half on both sides; send what was measured."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    model = MODELS[model_number]
    torch.manual_seed(1)
    x, target = torch.randn(model.batch_shape), torch.randn(model.batch_shape)
    # The hand-written half compares no losses of several microbatches.
    training = stagepack.train(
        bundle_path, torch.nn.functional.mse_loss, microbatches=MICROBATCHES, loss_reduction="mean"
    )
    hand_written_half, hand_written_step = make_hand_written(model, rank, x, target)
    ours_by_name = dict(training.named_parameters())
    half = len(hand_written_half.layers)
    pairs = [
        (ours_by_name[f"layers.{number + rank * half}.{name}"], parameter)
        for number, layer in enumerate(hand_written_half.layers)
        for name, parameter in layer.named_parameters()
    ]
    our_parameters, their_parameters = ([pair[side] for pair in pairs] for side in (0, 1))

    def our_step() -> None:
        clear_gradients(our_parameters)
        training.step(x, target=target)

    def their_step() -> None:
        clear_gradients(their_parameters)
        hand_written_step()

    our_step()
    their_step()
    difference = max(
        float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        for ours, theirs in pairs
        if ours.grad is not None and theirs.grad is not None
    )
    blocks = {"ours": partial(repeat, our_step), "theirs": partial(repeat, their_step)}
    seconds = seconds_in_turns(blocks, BLOCKS, warm_rounds=2, wait=torch.distributed.barrier)
    our_times, their_times = ([block / STEPS for block in times] if rank == 0 else [] for times in seconds.values())
    sender.send((our_times, their_times, difference))
    torch.distributed.destroy_process_group()


def make_hand_written(
    model: Model, rank: int, x: torch.Tensor, target: torch.Tensor
) -> tuple[HandWrittenHalf, Callable[[], object]]:
    """The half of this process as a user would write it, and its step."""
    torch.manual_seed(0)
    half = HandWrittenHalf(model.make(), rank)
    example = torch.empty(model.batch_shape[0] // MICROBATCHES, *model.batch_shape[1:], device="meta")
    stage = PipelineStage(
        half,
        rank,
        PROCESSES,
        torch.device("cpu"),
        input_args=(example.requires_grad_(rank > 0),),
        output_args=(example.clone().requires_grad_(),),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step() -> object:
        if rank == 0:
            return schedule.step(x)
        losses: list[torch.Tensor] = []
        schedule.step(target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return half, step


def clear_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Forget the gradients, as `zero_grad` of optimizers does."""
    for parameter in parameters:
        parameter.grad = None


def repeat(step: Callable[[], None]) -> None:
    """A block of steps."""
    for _ in range(STEPS):
        step()


if __name__ == "__main__":
    main()
