"""What each process does with models of the zoo: ``architecture_worker.py FOLDER OPERATORS BUNDLE:SCHEDULE ...``.

A run ``BUNDLE:SCHEDULE`` trains one step on ``batch-0.safetensors``; ``BUNDLE:SCHEDULE:steps`` as many as there are batches, with an
optimizer, and saves the bundle.
"""

import importlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import stagepack
from tests.train.batch_files import read_batch
from tests.train.batches import LEARNING_RATE, MICROBATCHES, loss_of


def main() -> None:
    """Train the bundles of a folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    folder, operators = Path(sys.argv[1]), sys.argv[2]
    if operators:
        importlib.import_module(operators)
    for run in sys.argv[3:]:
        bundle_name, schedule, *options = run.split(":")
        train(folder, bundle_name, schedule, has_steps=bool(options))
    torch.distributed.destroy_process_group()


def train(folder: Path, bundle_name: str, schedule: str, *, has_steps: bool) -> None:
    """Train a bundle, and write the losses and gradients of the first step, and the weights after the last one."""
    bundle = stagepack.open(folder / f"{bundle_name}.stagepack")
    namespaces = {namespace for stage in bundle.stages for namespace in stage.namespaces}
    # Rows of some models meet, such as in a mixture of experts: the reference works on one microbatch after the other too.
    training = stagepack.train(
        bundle,
        loss_of,
        microbatches=MICROBATCHES,
        schedule=schedule,
        batch_dim=0,
        loss_reduction="mean",
        allow_ops=sorted(namespaces),
    )
    # torch refuses an optimizer of no parameters, which a stage may have.
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE) if has_steps else None
    losses: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    batch_paths = sorted(folder.glob("batch-*.safetensors"))
    for batch_path in batch_paths if has_steps else batch_paths[:1]:
        batch = read_batch(batch_path)
        losses.append(training.step(*batch.args, target=batch.targets, **batch.kwargs))
        gradients = gradients or {
            name: p.grad.clone(memory_format=torch.contiguous_format)
            for name, p in training.named_parameters()
            if p.grad is not None
        }
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    result_path = folder / f"{bundle_name}-{schedule}-{training.rank}.safetensors"
    save_file(gradients | {"losses": torch.stack(losses)}, result_path)
    if has_steps:
        weights = {name: tensor.contiguous() for name, tensor in training.own_weights()}
        save_file(weights, folder / f"weights-{training.rank}.safetensors")
        stagepack.save(training, out=folder / f"{bundle_name}-trained.stagepack")


if __name__ == "__main__":
    main()
