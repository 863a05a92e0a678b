"""A loaded stage as a module of torch in its user's hands."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import stagepack
from stagepack.errors import InputError
from stagepack_loaders.torch.stage import TorchStage


class Tied(nn.Module):
    """A weight with two names, and a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        result: torch.Tensor = self.last(self.first(x).relu()) + self.count
        return result


@pytest.fixture(params=[False, True], ids=["whole", "modules"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> TorchStage:
    torch.manual_seed(0)
    bundle = stagepack.export(Tied(), (torch.randn(2, 4),), out=tmp_path / "m.stagepack")
    return stagepack.load_stage(bundle, 0, modules=request.param)


@torch.no_grad()
def test_a_tied_weight_is_replaced_under_all_its_names(stage: TorchStage) -> None:
    x = torch.randn(2, 4)
    new = nn.Parameter(torch.eye(4))
    stage.get_submodule("first").weight = new
    with pytest.raises(InputError, match=r"first.weight and last.weight are one weight in the model"):
        stage(x)
    stage.get_submodule("last").weight = new
    assert torch.equal(stage(x)[0], x.relu() + 4)


@torch.no_grad()
def test_a_weight_that_is_gone_is_named(stage: TorchStage) -> None:
    prune.random_unstructured(stage.get_submodule("first"), "weight", amount=0.5)
    with pytest.raises(InputError, match=r"the weight first.weight was removed: a loaded stage cannot be pruned"):
        stage(torch.randn(2, 4))


@torch.no_grad()
def test_state_is_reset_in_the_buffer_that_is_there(stage: TorchStage) -> None:
    x = torch.randn(2, 4)
    stage.load_state_dict({name: tensor.clone() for name, tensor in stage.state_dict().items()}, assign=False)
    stage.count = torch.full((), 10.0)
    stage(x)
    assert stage.count == 11
    stage.reset_state()
    assert stage.count == 3
    stage.count = torch.zeros(2)
    with pytest.raises(InputError, match="count was replaced by a buffer of another size"):
        stage.reset_state()


@torch.no_grad()
def test_a_copy_has_weights_of_its_own(stage: TorchStage) -> None:
    x = torch.randn(2, 4)
    other = copy.deepcopy(stage)
    other.get_parameter("first.weight").zero_()
    assert other.get_parameter("last.weight").count_nonzero() == 0
    assert other(x)[0].unique().numel() == 1
    assert stage(x)[0].unique().numel() > 1


def test_a_stage_is_computed_again_by_a_checkpoint(stage: TorchStage) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    [expected] = torch.autograd.grad(stage(x)[0].sum(), x)
    result = checkpoint(lambda values: stage(values)[0] * 2, x, use_reentrant=False)
    [gradient] = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, expected * 2)


def test_a_stage_is_not_pickled(stage: TorchStage) -> None:
    with pytest.raises(TypeError, match="a loaded stage cannot be pickled: pass on the bundle"):
        torch.save(stage, io.BytesIO())
