"""Two pipelines of two processes have the gradients of one process that has all of both batches."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import stagepack
from stagepack.errors import OptionError
from stagepack_loaders.train.shared_parameters import groups_of_mesh
from tests.train import mode_models, models
from tests.train.processes import run_workers
from tests.train.replica_worker import MICROBATCHES

pytestmark = pytest.mark.xdist_group("train")


def check_gradients(folder: Path, model_name: str, losses: float, gradients: dict[str, torch.Tensor]) -> None:
    seen = set()
    for rank in range(4):
        found = load_file(folder / f"{model_name}-{rank}.safetensors")
        torch.testing.assert_close(found.pop("losses").sum().item(), losses, rtol=1e-12, atol=0)
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        torch.testing.assert_close(found.pop("norm"), norm, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            seen.add(name)
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)
    assert seen == set(gradients)


@pytest.mark.slow
def test_tied_weights(tmp_path: Path) -> None:
    models.export_model(tmp_path / "tied.stagepack", 2)
    run_workers("tests.train.replica_worker", 4, tmp_path, "tied")
    total, gradients = models.reference_gradients()
    check_gradients(tmp_path, "tied", total.item(), gradients)
    stagepack.open(tmp_path / "tied-saved.stagepack").verify()


@pytest.mark.slow
def test_dropout_and_the_running_statistics_of_the_first_pipeline(tmp_path: Path) -> None:
    mode_models.export_model(tmp_path / "noisy.stagepack", 2)
    run_workers("tests.train.replica_worker", 4, tmp_path, "noisy")
    losses, model = mode_models.reference_run(MICROBATCHES, replicas=2)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    check_gradients(tmp_path, "noisy", sum(losses), gradients)


def test_other_dimensions_are_refused() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # public, and not in its type hints
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match=r"mesh: expected the dimensions 'pp', .* found \('pp', 'tp'\)"):
            groups_of_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")))
    finally:
        torch.distributed.destroy_process_group()


def test_groups_of_a_gpu_alone_are_refused(tmp_path: Path) -> None:
    models.export_model(tmp_path / "m.stagepack", 2)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # public, and not in its type hints
    torch.distributed.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match=r"of the host too, found cuda:gloo: .*'cpu:gloo,cuda:nccl'"):
            stagepack.train(tmp_path / "m.stagepack", models.loss_of, microbatches=1, schedule="looped-bfs")
    finally:
        torch.distributed.destroy_process_group()
