"""What each process of two pipelines does: ``replica_worker.py FOLDER MODEL``."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import stagepack
from tests.train import mode_models, models

MICROBATCHES = 2


def main() -> None:
    """Train a bundle of two stages in two pipelines, each with a half of the batch."""
    folder, model_name = Path(sys.argv[1]), sys.argv[2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    loss: Any = models.loss_of if model_name == "tied" else mode_models.loss_of
    training = stagepack.train(
        folder / f"{model_name}.stagepack",
        loss,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        mesh=mesh,
        seed=mode_models.SEED,
    )
    replica = mesh.get_local_rank("dp")
    losses = []
    for step in range(2):
        if model_name == "tied":
            (ids, mask, scale), target = models.batch(step)
            labels = target["labels"].chunk(2)[replica]
            losses.append(
                training.step(ids.chunk(2)[replica], mask.chunk(2)[replica], scale, target={"labels": labels})
            )
        else:
            x, goal = mode_models.batch(step, 2 * MICROBATCHES)
            losses.append(training.step(x.chunk(2)[replica], target=goal.chunk(2)[replica]))
    gradients = {name: p.grad for name, p in training.named_parameters() if p.grad is not None}
    norm = training.clip_gradients(1e9)
    save_file(
        gradients | {"losses": torch.stack(losses), "norm": norm}, folder / f"{model_name}-{training.rank}.safetensors"
    )
    stagepack.save(training, out=folder / f"{model_name}-saved.stagepack")
    training.close()


if __name__ == "__main__":
    main()
