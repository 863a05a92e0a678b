"""What each process does: steps of a model with dropout and batch norm, and a saved bundle: ``mode_worker.py FOLDER RUN ...``."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import stagepack
from tests.train.mode_models import SEED, STEPS, batch, loss_of


def main() -> None:
    """Train the bundles of a folder."""
    folder = Path(sys.argv[1])
    for run in sys.argv[2:]:
        stage_count, schedule, microbatches = run.split(":")
        training = stagepack.train(
            folder / f"{stage_count}.stagepack", loss_of, microbatches=int(microbatches), schedule=schedule, seed=SEED
        )
        random_state = torch.get_rng_state()
        batches = [batch(number, int(microbatches)) for number in range(STEPS)]
        losses = [training.step(x, target=target) for x, target in batches]
        assert torch.equal(random_state, torch.get_rng_state())
        gradients = {name: p.grad for name, p in training.named_parameters() if p.grad is not None}
        stagepack.save(training, out=folder / f"{run}.stagepack")
        save_file(gradients | {"losses": torch.stack(losses)}, folder / f"{run}-{training.rank}.safetensors")
        training.close()


if __name__ == "__main__":
    main()
