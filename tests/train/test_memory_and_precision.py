"""Values that are computed again, autocast, bfloat16, and gradients of several steps: all stages in this process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import OptionError
from stagepack_train.training_options import Recompute
from tests.train.models import NOISY, Call, LayerModel, export_layers, mean_square, noisy_batch

pytestmark = [pytest.mark.xdist_group("train"), pytest.mark.usefixtures("one_process")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of equal layers with dropout, and one with batch norms."""
    path = tmp_path_factory.mktemp("memory")
    export_layers(path / "layers.stagepack", width=8)
    NOISY.export(path / "norms.stagepack", stages=2)
    return path


def run(bundle: Path, batches: Sequence[Call], recompute: Recompute = None) -> dict[str, torch.Tensor]:
    """The losses and gradients of some steps."""
    training = stagepack.train(bundle, mean_square, microbatches=2, schedule="looped-bfs", recompute=recompute)
    losses = [training.step(*args, target=target) for args, target in batches]
    weights = {name: weight.clone() for name, weight in training.own_weights()}
    gradients = {f"gradient of {name}": p.grad for name, p in training.named_parameters() if p.grad is not None}
    return weights | gradients | {"losses": torch.stack(losses)}


@pytest.mark.filterwarnings("ignore::stagepack.errors.MicrobatchWarning")
@pytest.mark.parametrize("recompute", ["regions", "stages"])
@pytest.mark.parametrize("bundle_name", ["layers", "norms"])
def test_recomputed_values_give_the_same_bits(folder: Path, bundle_name: str, recompute: Recompute) -> None:
    bundle = folder / f"{bundle_name}.stagepack"
    batches = [noisy_batch(number) for number in range(2)]
    expected, found = run(bundle, batches), run(bundle, batches, recompute=recompute)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_schedules_that_split_the_backward_pass_recompute_nothing(folder: Path) -> None:
    with pytest.raises(OptionError, match="recompute: the schedule 'zbv-zero-bubble' splits the backward pass"):
        stagepack.train(
            folder / "layers.stagepack", mean_square, microbatches=2, schedule="zbv-zero-bubble", recompute="regions"
        )


@pytest.mark.slow
def test_recomputed_values_need_no_memory(tmp_path: Path) -> None:
    export_layers(tmp_path / "layers.stagepack", width=256)

    def peak_bytes(recompute: str) -> int:
        command = [sys.executable, "-m", "tests.train.worker", "memory", str(tmp_path / "layers.stagepack"), recompute]
        # glibc would keep the memory of freed tensors for smaller ones.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    kept, regions, stages = map(peak_bytes, ("none", "regions", "stages"))
    # Each of 16 layers keeps some values of 8 MiB, of which its input remains.
    assert regions < kept - 400 * 2**20
    assert stages < kept - 200 * 2**20


def test_autocast_reaches_the_stages_and_follows_the_boundary_contract(tmp_path: Path) -> None:
    export_layers(tmp_path / "m.stagepack", width=8, dtype=torch.float32, dropout=0.0)
    (x,), target = noisy_batch(0)
    x, target = x.float(), target.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(tmp_path / "m.stagepack", [((x,), target)])
    exact = run(tmp_path / "m.stagepack", [((x,), target)])
    model = LayerModel(8, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = sum(
            (mean_square(model(part), goal) / 2 for part, goal in zip(x.chunk(2), target.chunk(2), strict=True)),
            torch.zeros(()),
        )
    loss.backward()
    torch.testing.assert_close(found["losses"][0].float(), loss.detach(), rtol=1e-6, atol=0)
    assert not torch.equal(found["losses"], exact["losses"])
    for name, parameter in model.named_parameters():
        gradient = found[f"gradient of {name}"]
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2, atol=1e-2 * gradient.abs().max().item())


@pytest.mark.parametrize("recompute", [None, "regions", "stages"])
def test_values_that_cross_keep_their_dtypes_in_autocast(tmp_path: Path, recompute: Recompute) -> None:
    """Autocast computes the last operator of each stage in bfloat16, around the load of the stages and their steps."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    rows = {0: torch.export.Dim("rows", max=8)}
    stagepack.export(
        model, (torch.ones(4, 8),), out=tmp_path / "m.stagepack", split_at=["1", "2"], dynamic_shapes=(rows,)
    )
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(tmp_path / "m.stagepack", [((x,), target)], recompute)
        hidden = model[1](model[0](x).float())
        loss = mean_square(model[2](hidden).float(), target)
    loss.backward()
    torch.testing.assert_close(found["losses"][0].float(), loss.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        bound = 1e-2 * parameter.grad.abs().max().item()
        torch.testing.assert_close(found[f"gradient of {name}"], parameter.grad, rtol=1e-2, atol=bound)


def test_bfloat16_and_the_gradients_of_several_steps(tmp_path: Path) -> None:
    export_layers(tmp_path / "m.stagepack", width=8, dtype=torch.bfloat16, dropout=0.0)
    batches = [((x.bfloat16(),), target.bfloat16()) for (x,), target in map(noisy_batch, range(2))]
    found = run(tmp_path / "m.stagepack", batches)
    model = LayerModel(8, 0.0).bfloat16()
    for (x,), target in batches:
        for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
            (mean_square(model(part), goal) / 2).backward()
    for name, parameter in model.named_parameters():
        # The schedule adds the gradients of microbatches in another order.
        gradient = found[f"gradient of {name}"]
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, parameter.grad, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())
