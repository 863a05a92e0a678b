"""Training in several processes: losses, gradients, steps and saved bundles are those of one process, or torch cannot do it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh

import stagepack
from stagepack.errors import EvaluationModeWarning, MicrobatchWarning, OptionError
from stagepack_train.replicas import groups_of_mesh
from stagepack_train.schedules import SCHEDULES, check_microbatches
from tests.train.models import BRANCHES, MODELS, NOISY, SEQUENCES, STEPS, TIED, batch_shapes, noisy_batch
from tests.train.processes import run_workers
from tests.train.worker import CHECKPOINT_STEPS, KILL_STEP

pytestmark = pytest.mark.xdist_group("train")

MICROBATCHES = range(1, 9)
PROCESSES = (2, 4)
# `test_all_schedules` has all.
QUICK_RUNS = (
    "tied:2:gpipe:1",
    "tied:2:1f1b:4",
    "tied:4:1f1b:4",  # joined into a stage for each process
    "tied:4:looped-bfs:2",
    "tied:4:interleaved-zero-bubble:4",
    "tied:4:zbv-zero-bubble:8",
    "noisy:2:1f1b:4",
    "noisy:4:interleaved-zero-bubble:2",
)
BRANCH_RUNS = (
    "2:gpipe:4:adamw",
    "2:1f1b:2:adamw",
    "4:looped-bfs:2:sgd",
    "4:interleaved-1f1b:4:adamw",
    "4:interleaved-zero-bubble:4:adamw",
    "4:zbv-zero-bubble:4:adamw",
)


def stage_count_of(schedule: str, process_count: int) -> int:
    return process_count if schedule in ("gpipe", "1f1b") else 2 * process_count


def is_possible(schedule: str, microbatches: int, process_count: int) -> bool:
    try:
        check_microbatches(schedule, microbatches, stage_count_of(schedule, process_count), process_count)
    except OptionError:
        return False
    return True


def export_bundles(folder: Path, *names: str) -> None:
    """Export models, each called ``MODEL-STAGES``. A bundle that there is of a model is cut again."""
    bundles: dict[str, stagepack.Bundle] = {}
    for name in names:
        model_name, stage_count = name.split("-")
        out, stages = folder / f"{name}.stagepack", int(stage_count)
        if model_name in bundles:
            stagepack.recut(bundles[model_name], out=out, stages=stages)
        else:
            bundles[model_name] = MODELS[model_name].export(out, stages=stages)


def check_run(folder: Path, run: str, process_count: int, replicas: int = 1) -> None:
    """Assert that processes have the losses, gradients and running statistics of one process."""
    model_name, _, _, microbatches = run.split(":")
    losses, model = MODELS[model_name].reference(int(microbatches), replicas)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    seen = set()
    for rank in range(process_count):
        found = load_file(folder / f"{run}-{rank}.tensors")
        torch.testing.assert_close(found.pop("losses").tolist(), losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.pop("norm"), norm, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            seen.add(name)
            # A bias before a batch norm has the gradient 0, and rounding of the size of other gradients.
            is_scaled, scale = model_name == "tied" and replicas == 1, gradients[name].abs().max().item()
            rtol, atol = (0, 1e-12 * scale) if is_scaled else (1e-12, 1e-14)
            torch.testing.assert_close(gradient, gradients[name], rtol=rtol, atol=atol)
    assert seen == set(gradients)
    # The bundle of several pipelines has the running statistics of the first one.
    weights = model.state_dict() if replicas == 1 else {name: p.detach() for name, p in model.named_parameters()}
    for stage in stagepack.load(folder / f"{run}.stagepack").stages:
        for name, tensor in stage.state_dict().items():
            if name in weights or (model_name == "noisy" and replicas == 1):
                torch.testing.assert_close(tensor, weights[name], rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written."""
    path = tmp_path_factory.mktemp("train")
    export_bundles(path, "tied-2", "tied-4", "noisy-2", "noisy-4")
    run_workers(2, "gradients", path, *QUICK_RUNS)
    return path


@pytest.mark.parametrize("run", QUICK_RUNS)
def test_gradients_are_those_of_one_process(folder: Path, run: str) -> None:
    check_run(folder, run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["tied", "noisy"])
@pytest.mark.parametrize("process_count", PROCESSES)
def test_all_schedules(process_count: int, model_name: str, tmp_path: Path) -> None:
    runs = [
        f"{model_name}:{stage_count_of(schedule, process_count)}:{schedule}:{microbatches}"
        for schedule in SCHEDULES
        for microbatches in MICROBATCHES
        if is_possible(schedule, microbatches, process_count)
    ]
    export_bundles(tmp_path, f"{model_name}-{process_count}", f"{model_name}-{2 * process_count}")
    run_workers(process_count, "gradients", tmp_path, *runs)
    for run in runs:
        check_run(tmp_path, run, process_count)


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["tied", "noisy"])
def test_two_pipelines_have_the_gradients_of_one(model_name: str, tmp_path: Path) -> None:
    export_bundles(tmp_path, f"{model_name}-2")
    run_workers(4, "gradients", tmp_path, f"{model_name}:2:1f1b:2")
    check_run(tmp_path, f"{model_name}:2:1f1b:2", 4, replicas=2)
    stagepack.open(tmp_path / f"{model_name}:2:1f1b:2.stagepack").verify()


def test_numbers_of_microbatches_that_torch_cannot_do() -> None:
    refused = {
        (schedule, process_count): [m for m in MICROBATCHES if not is_possible(schedule, m, process_count)]
        for schedule in SCHEDULES
        for process_count in PROCESSES
    }
    assert {key: numbers for key, numbers in refused.items() if numbers} == {
        ("1f1b", 2): [1],
        ("1f1b", 4): [1, 2, 3],
        ("interleaved-1f1b", 2): [5, 7],
        ("interleaved-zero-bubble", 2): [5, 7],
    }
    with pytest.raises(OptionError, match=r"'1f1b' .*: expected 4 microbatches or more, found 3: choose 'gpipe'"):
        check_microbatches("1f1b", 3, 4, 4)
    with pytest.raises(OptionError, match=r"rounds of equal size, .*: expected a multiple of 2 microbatches, found 5"):
        check_microbatches("interleaved-1f1b", 5, 4, 2)
    with pytest.raises(OptionError, match="microbatches: expected an integer from 1 on, found 0"):
        check_microbatches("gpipe", 0, 2, 2)


def test_parameters_without_a_gradient_and_a_batch_that_does_not_go_first(tmp_path: Path) -> None:
    """In each schedule, as in one process."""
    branches = BRANCHES.export(tmp_path / "branches-2.stagepack", split_at=["upper"])
    stagepack.recut(branches, out=tmp_path / "branches-4.stagepack", split_at=["early", "middle", "upper"])
    sequences = SEQUENCES.export(tmp_path / "sequences-2.stagepack", split_at=["layers.2"])
    layers = ["layers.1", "layers.2", "layers.3"]
    stagepack.recut(sequences, out=tmp_path / "sequences-4.stagepack", split_at=layers)
    run_workers(2, "branches", tmp_path, *BRANCH_RUNS)


def test_steps_and_the_saved_bundle_are_those_of_one_process(folder: Path) -> None:
    run_workers(2, "steps", folder, "tied:4:interleaved-1f1b:4")
    losses, model = TIED.trained_reference()
    for rank in range(2):
        found_losses = load_file(folder / f"losses-{rank}.safetensors")["losses"]
        torch.testing.assert_close(found_losses, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=0)
    trained = stagepack.open(folder / "trained.stagepack")
    trained.verify()
    args, _ = TIED.batch(STEPS, 8)
    loaded = stagepack.load(trained)
    with torch.no_grad():
        torch.testing.assert_close(loaded(*args), model(*args), rtol=1e-9, atol=1e-12)
    weights = load_file(folder / "weights-0.safetensors") | load_file(folder / "weights-1.safetensors")
    assert set(weights) == set(dict(model.named_parameters()))
    for stage in loaded.stages:
        for name, tensor in stage.state_dict().items():
            assert name not in weights or torch.equal(tensor, weights[name])
    assert not list(folder.glob(".*"))


def test_mistakes_are_told_by_all_processes(folder: Path) -> None:
    (folder / "full").mkdir()
    run_workers(2, "mistakes", folder, "tied:2:gpipe:4")


def test_groups_of_a_gpu_alone_are_refused(folder: Path) -> None:
    """Before `one_process`, which makes the default group."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # public, and not in its type hints
    torch.distributed.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match=r"of the host too, found cuda:gloo: .*'cpu:gloo,cuda:nccl'"):
            stagepack.train(folder / "tied-2.stagepack", TIED.loss, microbatches=1, schedule="looped-bfs")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_bundle_in_evaluation_mode_says_so(tmp_path: Path) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    bundle = stagepack.export(NOISY.new().eval(), (x,), out=tmp_path / "e.stagepack")
    message = r"7 modules .* such as 'blocks.0.1', were exported in evaluation mode"
    with pytest.warns(EvaluationModeWarning, match=message):
        stagepack.train(bundle, NOISY.loss, microbatches=1, schedule="looped-bfs")


@pytest.mark.usefixtures("one_process")
def test_trained_weights_go_into_the_graphs_of_the_evaluation_mode(tmp_path: Path) -> None:
    ((x,), target), model = noisy_batch(0), NOISY.new()
    bundle = NOISY.export(tmp_path / "training.stagepack", stages=2)
    evaluation = stagepack.export(
        model.eval(), (x,), out=tmp_path / "evaluation.stagepack", dynamic_shapes=batch_shapes()
    )
    with pytest.warns(MicrobatchWarning, match="computes its statistics from all rows"):
        training = stagepack.train(bundle, NOISY.loss, microbatches=2, schedule="looped-bfs")
    training.step(x, target=target)
    with torch.no_grad():
        for parameter in training.parameters():
            parameter.mul_(0.5)
    trained = stagepack.save(training, out=tmp_path / "trained.stagepack")
    served = stagepack.export(trained.path, graph_from=evaluation.path, out=tmp_path / "served.stagepack")
    model.load_state_dict(dict(training.own_weights()))
    with torch.no_grad():
        assert torch.equal(stagepack.load(served)(x), model(x))


@pytest.mark.usefixtures("one_process")
def test_a_mesh_of_other_dimensions_is_refused() -> None:
    with pytest.raises(OptionError, match=r"mesh: expected the dimensions 'pp', .* found \('pp', 'tp'\)"):
        groups_of_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")))


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_restores_the_scheduler_of_learning_rates(tmp_path: Path) -> None:
    """As docs/how-to/train.md writes it: a run that goes on after 3 of 6 steps ends with the bits of one without a break."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    stagepack.export(
        model,
        (torch.ones(4, 8),),
        out=tmp_path / "m.stagepack",
        stages=2,
        dynamic_shapes=({0: torch.export.Dim("rows", max=8)},),
    )
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(6)]

    def run(first: int, last: int, *, load: bool, save: bool) -> dict[str, torch.Tensor | int]:
        loss = torch.nn.functional.mse_loss
        training = stagepack.train(tmp_path / "m.stagepack", loss, microbatches=2, schedule="looped-bfs")
        optimizer = torch.optim.AdamW(training.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        checkpoint = training.state_dict(optimizer) | {"scheduler": scheduler.state_dict()}
        if load:
            load_checkpoint(checkpoint, checkpoint_id=tmp_path / "checkpoint")
            training.load_state_dict(checkpoint, optimizer)
            scheduler.load_state_dict(checkpoint["scheduler"])
        for x, target in batches[first:last]:
            training.step(x, target=target)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        checkpoint = training.state_dict(optimizer) | {"scheduler": scheduler.state_dict()}
        if save:
            save_checkpoint(checkpoint, checkpoint_id=tmp_path / "checkpoint")
        return {name: weight.clone() for name, weight in training.own_weights()} | {"steps": scheduler.last_epoch}

    expected = run(0, 6, load=False, save=False)
    run(0, 3, load=False, save=True)
    torch.testing.assert_close(run(3, 6, load=True, save=False), expected, rtol=0, atol=0)


def run_torchrun(process_count: int, *arguments: object) -> None:
    """Train with checkpoints under torchrun, which starts the processes again once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={process_count}", "-m", "tests.train.worker", "resume", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def steps_and_losses(folder: Path) -> tuple[list[int], list[float]]:
    lines = (folder / "losses.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines], [float(line.split()[1]) for line in lines]


@pytest.fixture(scope="module")
def killed_run(folder: Path) -> Path:
    """A run of two processes of which the second is killed."""
    path = folder / "run"
    path.mkdir()
    run_torchrun(2, folder / "tied-2.stagepack", "1f1b", path, 1)
    return path


@pytest.mark.slow
def test_a_killed_run_goes_on(killed_run: Path) -> None:
    steps, losses = steps_and_losses(killed_run)
    last_checkpoint = KILL_STEP // CHECKPOINT_STEPS * CHECKPOINT_STEPS
    assert steps == [*range(KILL_STEP), *range(last_checkpoint, STEPS)]
    expected, _ = TIED.trained_reference()
    torch.testing.assert_close(losses, [expected[step] for step in steps], rtol=1e-9, atol=0)
    assert losses[last_checkpoint:KILL_STEP] == losses[KILL_STEP : 2 * KILL_STEP - last_checkpoint]


@pytest.mark.slow
@pytest.mark.parametrize(("process_count", "schedule"), [(1, "looped-bfs"), (4, "1f1b")])
def test_a_checkpoint_is_read_by_other_numbers_of_processes_and_stages(
    folder: Path, killed_run: Path, tmp_path: Path, process_count: int, schedule: str
) -> None:
    shutil.copytree(killed_run / "3", tmp_path / "3")
    run_torchrun(process_count, folder / "tied-4.stagepack", schedule, tmp_path, -1)
    steps, losses = steps_and_losses(tmp_path)
    assert steps == list(range(3, STEPS))
    torch.testing.assert_close(losses, TIED.trained_reference()[0][3:], rtol=1e-9, atol=0)
