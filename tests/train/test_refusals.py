"""What cannot be trained is refused with the reason."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import stagepack
from stagepack.errors import CaptureError, InputError, OptionError, OutputExistsError
from stagepack.format.reader import Bundle
from stagepack_train.boundaries import find_boundaries
from stagepack_train.microbatches import CallInputs, fingerprint_of
from stagepack_train.schedules import place_stages_for
from stagepack_train.training import Training
from tests.train.models import TIED


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The model in four stages."""
    return TIED.export(tmp_path_factory.mktemp("bundle") / "4.stagepack", stages=4)


@pytest.fixture
def training(one_process: None, bundle: Bundle) -> Training:
    """All stages in this process."""
    return stagepack.train(bundle, TIED.loss, microbatches=4, schedule="looped-bfs")


def test_a_name_that_exists_is_refused_before_the_first_step(one_process: None, bundle: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "trained.stagepack"
    training = stagepack.train(bundle, TIED.loss, microbatches=4, schedule="looped-bfs", out=out)
    assert stagepack.save(training).path == out
    with pytest.raises(OutputExistsError, match="in Python overwrite=True"):
        stagepack.train(bundle, TIED.loss, microbatches=4, schedule="looped-bfs", out=out)
    with pytest.raises(OutputExistsError):
        stagepack.save(training)
    assert stagepack.save(training, overwrite=True).digest == Bundle(out).digest


def test_skips_pass_through_the_stages_between(bundle: Bundle) -> None:
    boundaries = find_boundaries(bundle)
    names = [{edge.name for edge in boundary.sent} for boundary in boundaries]
    (skip,) = names[0] & names[1] & names[2]
    assert {edge.name for edge in boundaries[3].received} == names[2]
    assert skip in boundaries[0].differentiable
    assert all(len(boundary.model_inputs) >= 2 for boundary in boundaries[1:3])


def test_a_batch_that_does_not_divide(training: Training) -> None:
    args, target = TIED.batch(0, 8)
    with pytest.raises(InputError, match=r"ids: expected a multiple of 4 rows, .* found 7"):
        training.step(*(arg[:7] if arg.dim() > 1 else arg for arg in args), target=target)
    with pytest.raises(
        InputError, match=r"target: expected the 16 rows of the batch in dimension 0, .* the shape \[3, 7\]"
    ):
        training.step(*args, target={"labels": target["labels"][:3]})
    assert training.step(*args, target=target) > 0


def test_targets(one_process: None, tmp_path: Path) -> None:
    """What is no tensor of rows is the same for each microbatch; objects that would be cut nowhere are refused."""

    class Target(NamedTuple):
        rows: torch.Tensor
        factor: torch.Tensor
        name: str | None = None

    x = torch.randn(4, 4)
    path = tmp_path / "linear.stagepack"
    stagepack.export(torch.nn.Linear(4, 4), (x[:2],), out=path, dynamic_shapes=({0: torch.export.Dim("batch")},))
    found: list[Any] = []

    def loss(result: torch.Tensor, target: Any) -> torch.Tensor:
        found.append(target)
        return result.mean()

    training = stagepack.train(path, loss, microbatches=2, schedule="looped-bfs", loss_reduction="mean")
    training.step(x, target=Target(x, torch.tensor(2.0)))
    assert [type(target) for target in found] == [Target, Target]
    assert torch.equal(torch.cat([target.rows for target in found]), x)
    with pytest.raises(InputError, match="target: expected tensors in lists, tuples and dicts, found ndarray"):
        training.step(x, target=[x.numpy()])


def test_losses_that_are_no_scalar(one_process: None, bundle: Bundle) -> None:
    args, target = TIED.batch(0, 8)
    results: dict[str, Any] = {
        "a tensor of shape (16,)": lambda result, _: result["mean"].mean(1).repeat(4),
        "float": lambda *_: 1.0,
    }
    for found, loss in results.items():
        training = stagepack.train(bundle, loss, microbatches=4, schedule="looped-bfs")
        with pytest.raises(OptionError, match=f"loss: expected .*, found {re.escape(found)}"):
            training.step(*args, target=target)


def test_stages_and_processes_that_do_not_fit_a_schedule(one_process: None, bundle: Bundle) -> None:
    with pytest.raises(OptionError, match="'1f1b' runs one stage in each process: expected 4 processes, found 1"):
        stagepack.train(bundle, TIED.loss, microbatches=4)
    with pytest.raises(OptionError, match="two stages in each process: expected 2 processes, found 3"):
        place_stages_for("zbv-zero-bubble", 4, 3)
    with pytest.raises(OptionError, match="4 stages do not divide into 3"):
        place_stages_for("looped-bfs", 4, 3)
    with pytest.raises(OptionError, match=r"expected one of 'gpipe', .* found 'fast'"):
        stagepack.train(bundle, TIED.loss, microbatches=4, schedule="fast")


class Selection(torch.nn.Module):
    """A size that data decide crosses from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden[x[:, 0] > 0]).sum()


def test_sizes_that_depend_on_data(one_process: None, tmp_path: Path) -> None:
    selected = stagepack.export(Selection(), (torch.randn(8, 4),), out=tmp_path / "s.stagepack", split_at=["second"])
    training = stagepack.train(selected, lambda result, _: result, microbatches=1, schedule="looped-bfs")
    with pytest.raises(OptionError, match="depends on data: schedules of torch exchange tensors of fixed shapes"):
        training.step(torch.randn(8, 4))


def test_an_existing_output_is_kept(training: Training, bundle: Bundle) -> None:
    with pytest.raises(stagepack.errors.OutputExistsError):
        stagepack.save(training, out=bundle.path)
    saved: Any = stagepack.save(training, out=bundle.path.with_name("same.stagepack"))
    assert saved.stages == bundle.stages


def test_checkpoints_that_do_not_fit(training: Training) -> None:
    """Nothing is changed by a checkpoint that lacks something or has tensors of other shapes, even of one that broadcasts."""
    optimizer = torch.optim.Adam(training.parameters())
    state = training.state_dict(optimizer)
    weight_name, weight = next(iter(state["model"].items()))
    moment_name = next(key for key in state["optimizer"] if key.endswith("exp_avg"))
    others: dict[str, dict[str, Any]] = {
        "expected the entry steps in the checkpoint, found model, optimizer": {
            key: value for key, value in state.items() if key != "steps"
        },
        rf"expected {weight_name} in the entry model .*, found none": state | {"model": {}},
        rf"model, {weight_name}: expected a tensor of shape .*, found \[\]": state
        | {"model": state["model"] | {weight_name: torch.tensor(7.0)}},
        rf"optimizer, {moment_name}: expected a tensor of shape .*, found float": state
        | {"optimizer": state["optimizer"] | {moment_name: 0.5}},
    }
    before = weight.clone()
    for message, other in others.items():
        with pytest.raises(InputError, match=message):
            training.load_state_dict(other, optimizer)
    assert torch.equal(weight, before)
    training.load_state_dict(state, optimizer)


def test_weights_in_one_memory_are_not_saved(one_process: None, tmp_path: Path) -> None:
    class Views(torch.nn.Module):
        rows: torch.Tensor
        row: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("rows", torch.arange(8.0).reshape(2, 4))
            self.register_buffer("row", self.rows[:1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.rows.sum() + self.row.sum()

    path = tmp_path / "views.stagepack"
    stagepack.export(Views(), (torch.ones(2, 4),), out=path)
    training = stagepack.train(path, lambda result, _: result.mean(), microbatches=1, schedule="looped-bfs")
    with pytest.raises(CaptureError, match="row shares memory with other weights"):
        stagepack.save(training, out=tmp_path / "saved.stagepack")
    assert [entry.name for entry in tmp_path.iterdir()] == ["views.stagepack"]


def test_checksums_of_batches() -> None:
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    tensors = [
        x,
        x.T,
        x[:, ::2],
        x[0, ::2],
        x.bool(),
        x.bfloat16(),
        (x + 1j).conj(),
        x[0, 0],
        x[:0],
        x.requires_grad_(),
    ]
    calls = [CallInputs(values={"x": tensor}, replicated=frozenset(), batch_size=3, sizes={}) for tensor in tensors]
    checksums = [fingerprint_of(call, with_content=True) for call in calls]
    assert len(set(checksums)) == len(tensors) - 1
    assert checksums[0] == checksums[-1]
    assert len({fingerprint_of(call, with_content=False) for call in calls}) == 1
