"""What is cut into microbatches is a dimension along which the model keeps rows apart, or the one that the caller names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.errors import InputError, MicrobatchWarning, OptionError
from stagepack.format.reader import Bundle
from tests.train.models import assert_step

pytestmark = pytest.mark.usefixtures("one_process")

TIME, BATCH = Dim("time", min=1, max=64), Dim("batch", min=1, max=64)
X = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Called(torch.nn.Module):
    """A function with a linear layer of its own before and after it."""

    def __init__(self, function: Callable[..., Any], *modules: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 3)
        self.inner = torch.nn.ModuleList(modules)
        self.function = function
        self.double()

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        result = self.function(self, torch.tanh(self.first(x)), *others)
        return self.last(result) if isinstance(result, torch.Tensor) else result


def encoder(*, batch_first: bool) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attend(model: Called, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.inner[0](x)
    return result


def export(model: torch.nn.Module, args: Any, shapes: Any, folder: Path) -> Bundle:
    """The model in two stages."""
    return stagepack.export(model, args, out=folder / "m.stagepack", split_at=["last"], dynamic_shapes=shapes)


def train(bundle: Bundle, **options: Any) -> Any:
    """Both stages in this process."""
    settings: dict[str, Any] = {"microbatches": 2, "schedule": "looped-bfs"} | options
    return stagepack.train(bundle, torch.nn.functional.mse_loss, **settings)


def assert_same(training: Any, model: torch.nn.Module, args: Any, target: Any) -> None:
    """Assert that a step has the loss and the gradients of one process."""
    model.zero_grad()
    assert_step(training, model, torch.nn.functional.mse_loss, (args, target), (1e-10, 0), (1e-8, 1e-12))


@pytest.mark.parametrize("options", [{}, {"batch_dim": "batch"}, {"batch_dim": 1}], ids=["found", "named", "numbered"])
def test_time_that_goes_first_is_not_cut(options: Any, tmp_path: Path) -> None:
    model = Called(attend, encoder(batch_first=False))
    training = train(export(model, (X,), ({0: TIME, 1: BATCH},), tmp_path), **options)
    assert_same(training, model, (X,), torch.randn(8, 4, 3, dtype=torch.float64))


def test_time_goes_with_the_batch_in_several_inputs(tmp_path: Path) -> None:
    """The mask has the batch first, the values have time first, and the result has no time."""

    def pool(model: Called, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mixed = model.inner[0](x, src_key_padding_mask=mask)
        return (mixed * mask.logical_not().T[..., None]).sum(0)

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    model, mask = Called(pool, layer), torch.arange(8) >= torch.tensor([[8], [6], [3], [5]])
    training = train(export(model, (X, mask), ({0: TIME, 1: BATCH}, ({0: BATCH, 1: TIME},)), tmp_path))
    assert_same(training, model, (X, mask), torch.randn(4, 3, dtype=torch.float64))


def test_inputs_that_all_rows_share_are_not_cut(tmp_path: Path) -> None:
    def positioned(model: Called, x: torch.Tensor, positions: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return attend(model, x + model.inner[1](positions) * scale)

    model = Called(positioned, encoder(batch_first=True), torch.nn.Embedding(64, 16))
    x, positions, scale = X.transpose(0, 1).contiguous(), torch.arange(8), torch.full((4,), 0.5)[:1].double()
    training = train(export(model, (x, positions, scale), ({0: BATCH, 1: TIME}, ({0: TIME}, None)), tmp_path))
    assert_same(training, model, (x, positions, scale), torch.randn(4, 8, 3, dtype=torch.float64))


def test_a_recurrent_network_keeps_its_state_apart(tmp_path: Path) -> None:
    def recur(model: Called, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model.inner[0](x, state)[0]
        return result

    model, state = Called(recur, torch.nn.GRU(16, 16, num_layers=2)), torch.randn(2, 4, 16, dtype=torch.float64)
    training = train(export(model, (X, state), ({0: TIME, 1: BATCH}, ({1: BATCH},)), tmp_path))
    assert_same(training, model, (X, state), torch.randn(8, 4, 3, dtype=torch.float64))


def test_rows_that_are_merged_with_times_are_joined_where_they_are_in_one_piece(tmp_path: Path) -> None:
    model, x = Called(lambda _, x: x.flatten(0, 1)), X.transpose(0, 1).contiguous()
    training = train(export(model, (x,), ({0: BATCH, 1: TIME},), tmp_path))
    assert_same(training, model, (x,), torch.randn(32, 3, dtype=torch.float64))


MEETINGS: dict[str, Callable[..., Any]] = {
    "mean": lambda _, x: x - x.mean(0),
    "similarity": lambda _, x: torch.softmax(x @ x.T, -1) @ x,
    "sum of squares": lambda _, x: x / x.square().sum().sqrt(),
    "cumulative sum": lambda _, x: x.cumsum(0),
    "other row": lambda _, x: x + x.flip(0),
    "number of rows": lambda _, x: x / x.shape[0],
    "position": lambda _, x: x + torch.arange(x.shape[0])[:, None],
    "top": lambda _, x: x * (x >= x.topk(2, 0).values[-1]),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_rows_that_meet_are_refused_unless_the_dimension_is_named(name: str, tmp_path: Path) -> None:
    model, x = Called(MEETINGS[name]), torch.randn(8, 16, dtype=torch.float64)
    bundle = export(model, (x,), ({0: Dim("batch", min=2, max=64)},), tmp_path)
    with pytest.raises(
        OptionError, match=r"batch_dim: the model keeps the rows of no dimension apart: batch: aten\.\S+"
    ):
        train(bundle)
    with pytest.warns(MicrobatchWarning, match=r"of each microbatch, .*: aten\.\S+"):
        training = train(bundle, batch_dim="batch")
    target, expected = torch.randn(8, 3, dtype=torch.float64), torch.zeros(())
    for part, goal in zip(x.chunk(2), target.chunk(2), strict=True):
        expected = expected + torch.nn.functional.mse_loss(model(part), goal).detach() / 2
    torch.testing.assert_close(training.step(x, target=target), expected)
    whole = train(bundle, microbatches=1)
    assert_same(whole, model, (x,), target)


def test_the_statistics_of_batch_norm_are_those_of_microbatches(tmp_path: Path) -> None:
    model, x = Called(attend, torch.nn.BatchNorm1d(16)), torch.randn(8, 16, dtype=torch.float64)
    bundle = export(model, (x,), ({0: Dim("batch", min=2, max=64)},), tmp_path)
    with pytest.warns(MicrobatchWarning, match=r"aten\.\S+ in inner.0 computes its statistics from all rows"):
        train(bundle)


def test_only_the_batch_of_a_batch_norm_is_cut(tmp_path: Path) -> None:
    model = Called(lambda m, x: m.inner[0](x.movedim(0, 2)).movedim(2, 0), torch.nn.BatchNorm1d(16))
    bundle = export(model, (X.movedim(1, 2) @ torch.ones(4, 16).double(),), ({0: TIME},), tmp_path)
    with pytest.raises(OptionError, match=r"time: aten\.\S+ in inner.0 computes its statistics from all rows"):
        train(bundle)


def test_a_model_without_a_batch_trains_with_one_microbatch(tmp_path: Path) -> None:
    model = Called(lambda _, x: x.mean(0, keepdim=True))
    training = train(export(model, (X[0],), None, tmp_path), microbatches=1)
    assert_same(training, model, (X[0],), torch.randn(1, 3, dtype=torch.float64))


def test_a_fixed_batch_is_that_of_a_microbatch(tmp_path: Path) -> None:
    model, x, shared = Called(lambda _, x, y: x + y), torch.randn(8, 16, dtype=torch.float64), torch.randn(16).double()
    training = train(export(model, (x[:4], shared), None, tmp_path))
    assert_same(training, model, (x, shared), torch.randn(8, 3, dtype=torch.float64))
    with pytest.raises(
        InputError, match="expected inputs that are 2 times as large as in the bundle, in the dimension of the batch"
    ):
        training.step(x[:4], shared)


def test_a_fixed_batch_is_cut_beside_times_that_are_not(tmp_path: Path) -> None:
    model, x = Called(attend, encoder(batch_first=True)), X.transpose(0, 1).contiguous()
    training = train(export(model, (x[:2],), ({1: TIME},), tmp_path))
    assert_same(training, model, (x,), torch.randn(4, 8, 3, dtype=torch.float64))


def test_batches_and_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def add(_: Called, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    model, x = Called(add), torch.randn(8, 16, dtype=torch.float64)
    training = train(export(model, (x, x), ({0: BATCH}, ({0: BATCH},)), tmp_path))
    target = torch.randn(8, 3, dtype=torch.float64)
    refused: dict[str, tuple[Any, Any]] = {
        r"others_0: expected 8 rows, the size of the batch in x, found 6": ((x, x[:6]), target),
        "x: expected a multiple of 2 rows, .* found 7": ((x[:7], x[:7]), target),
        "x: a step computes the gradients of parameters only": ((x.clone().requires_grad_(), x), target),
        "target: expected the 8 rows of the batch in dimension 0, .* the shape \\[4, 3\\]": ((x, x), target[:4]),
        "target: expected the 8 rows .* the shape \\[3\\]": ((x, x), [target, torch.ones(3)]),
    }
    for message, (args, goal) in refused.items():
        with pytest.raises(InputError, match=message):
            training.step(*args, target=goal)
    assert_same(training, model, (x, x), target)


def test_dimensions_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    x = torch.randn(8, 16, dtype=torch.float64)
    bundle = export(Called(lambda _, x: x), (x,), ({0: BATCH},), tmp_path)
    for name in ("rows", "1"):
        message = f"batch_dim: expected the name of a dynamic dimension of the inputs, batch, found {name!r}"
        with pytest.raises(OptionError, match=message):
            train(bundle, batch_dim=name)
    for number in (2, -1, 1.0, True):
        message = r"batch_dim: expected the number of a dimension of x, of shape \[batch, 16\]"
        with pytest.raises(OptionError, match=message):
            train(bundle, batch_dim=number)
    with pytest.raises(OptionError, match="loss_reduction: expected 'mean', 'sum' or None, found 'max'"):
        train(bundle, loss_reduction="max")
