"""The loss of a batch is the one of one process, or refused with what to write instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import stagepack
from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack_train.training import Training
from tests.train.models import assert_step

pytestmark = pytest.mark.usefixtures("one_process")

CLASSES = 5
WEIGHTS = torch.linspace(0.1, 2, CLASSES, dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 6, 4, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (8, 6), generator=GENERATOR)
# Microbatches of two rows have 12, 5, 12 and 8 labels.
UNEQUAL = LABELS.masked_fill(torch.arange(6) >= torch.tensor([6, 6, 3, 2, 6, 6, 5, 3])[:, None], -100)
EQUAL = LABELS.masked_fill(torch.tensor([[False] * 5 + [True]] * 8), -100)


class Classifier(torch.nn.Module):
    """Logits of each token, a vector of each sequence, and numbers of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.vector = torch.nn.Linear(4, 8), torch.nn.Linear(8, CLASSES), torch.nn.Linear(8, 3)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        return {"logits": logits, "vector": self.vector(hidden.mean(1)), "scale": self.scale.exp()}


def new_model() -> Classifier:
    """The model with its first weights."""
    torch.manual_seed(0)
    return Classifier().double()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The model in two stages."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    path = tmp_path_factory.mktemp("loss") / "m.stagepack"
    return stagepack.export(new_model(), (X,), out=path, split_at=["last"], dynamic_shapes=shapes)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def masked_mean(result: Any, labels: torch.Tensor) -> torch.Tensor:
    mask = labels >= 0
    return (result["logits"].square().mean(-1) * mask).sum() / mask.sum()


def contrast(result: Any, _: Any) -> torch.Tensor:
    vectors = functional.normalize(result["vector"])
    return functional.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def divergence_of_equals(result: Any, _: Any) -> torch.Tensor:
    student = functional.log_softmax(result["logits"].float(), -1)
    return functional.kl_div(student, student.exp().detach() * (1 + 1e-7), reduction="batchmean")


def train(bundle: Bundle, loss: Callable[[Any, Any], torch.Tensor], **options: Any) -> Training:
    settings: dict[str, Any] = {"microbatches": 4, "schedule": "looped-bfs"} | options
    return stagepack.train(bundle, loss, **settings)


def assert_same(training: Training, loss: Callable[[Any, Any], torch.Tensor], target: Any, rtol: float) -> None:
    """Assert that a step has the loss and the gradients of one process."""
    assert_step(training, new_model(), loss, ((X,), target), (rtol, rtol), (rtol, rtol))


MEANS: dict[str, tuple[Callable[[Any, Any], torch.Tensor], Any]] = {
    "tokens": (lambda result, labels: cross_entropy(result["logits"], labels), LABELS),
    "ignored labels of equal number": (lambda result, labels: cross_entropy(result["logits"], labels), EQUAL),
    "sequences": (lambda result, _: result["vector"].square().mean(), None),
    "terms that cancel": (lambda result, _: (result["vector"] - 0.1).mean(), None),
    "divergence of equals": (divergence_of_equals, None),
    "low precision": (lambda result, labels: cross_entropy(result["logits"].bfloat16(), labels), LABELS),
    "a number of the model": (lambda result, _: (result["vector"] * result["scale"]).square().mean(), None),
    "labels in one dimension": (
        lambda result, labels: functional.cross_entropy(result["logits"].flatten(0, 1), labels),
        LABELS.flatten(),
    ),
    "nan": (lambda result, _: (result["vector"] * float("nan")).mean(), None),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_those_of_one_process(name: str, bundle: Bundle) -> None:
    loss, target = MEANS[name]
    training = train(bundle, loss)
    if name == "nan":
        assert training.step(X, target=target).isnan()
    else:
        assert_same(training, loss, target, 1e-2 if name == "low precision" else 1e-6)


REFUSED: dict[str, tuple[Callable[[Any, Any], torch.Tensor], Any, str]] = {
    "sum": (
        lambda result, labels: cross_entropy(result["logits"], labels, reduction="sum"),
        LABELS,
        "it is their sum: give loss_reduction='sum'",
    ),
    "ignored labels": (lambda result, labels: cross_entropy(result["logits"], labels), UNEQUAL, "ignore_index"),
    "weighted classes": (
        lambda result, labels: cross_entropy(result["logits"], labels, weight=WEIGHTS),
        LABELS,
        "divided by the number of all elements of the batch",
    ),
    "mask": (masked_mean, UNEQUAL, "weights or masks"),
    "all labels of a microbatch ignored": (
        lambda result, labels: cross_entropy(result["logits"], labels),
        LABELS.masked_fill(torch.arange(8)[:, None] // 2 == 2, -100),
        "ignore_index",
    ),
    "contrast": (contrast, None, "compares rows with each other"),
    "norm": (lambda result, _: result["vector"].norm(), None, "give loss_reduction='mean'"),
    "random": (lambda result, _: (result["vector"] * torch.rand(())).mean(), None, "draws random numbers"),
    "number of rows": (lambda result, _: result["vector"][:2].mean(), None, "give loss_reduction='mean'"),
    "fixed number of rows": (
        lambda result, _: result["vector"].view(2, 3).mean(),
        None,
        "it cannot be computed for two microbatches together",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_is_refused(name: str, bundle: Bundle) -> None:
    loss, target, advice = REFUSED[name]
    training = train(bundle, loss)
    state = torch.get_rng_state()
    with pytest.raises(
        OptionError, match=f"loss: the loss of a batch is not the mean of those of its microbatches: .*{advice}"
    ):
        training.step(X, target=target)
    if name != "random":
        assert torch.equal(state, torch.get_rng_state())


def test_each_step_is_checked(bundle: Bundle) -> None:
    def loss(result: Any, labels: Any) -> torch.Tensor:
        return cross_entropy(result["logits"], labels)

    training = train(bundle, loss)
    training.step(X, target=EQUAL)
    with pytest.raises(OptionError, match="ignore_index"):
        training.step(X, target=UNEQUAL)
    assert training.steps == 1


SUMS: dict[str, tuple[Callable[[Any, Any], torch.Tensor], Any]] = {
    "sum": (lambda result, labels: cross_entropy(result["logits"], labels, reduction="sum"), LABELS),
    "ignored labels": (
        lambda result, target: cross_entropy(result["logits"], target["labels"], reduction="sum") / target["count"],
        {"labels": UNEQUAL, "count": (UNEQUAL >= 0).sum()},
    ),
    "weighted classes": (
        lambda result, target: (
            cross_entropy(result["logits"], target["labels"], weight=WEIGHTS, reduction="sum") / target["weight"]
        ),
        {"labels": LABELS, "weight": WEIGHTS[LABELS].sum()},
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_those_of_one_process(name: str, bundle: Bundle) -> None:
    loss, target = SUMS[name]
    assert_same(train(bundle, loss, loss_reduction="sum"), loss, target, 1e-9)


def test_a_mean_by_definition_is_computed_once_for_each_microbatch(bundle: Bundle) -> None:
    calls = []

    def loss(result: Any, labels: Any) -> torch.Tensor:
        calls.append(len(labels))
        return cross_entropy(result["logits"], labels)

    training = train(bundle, loss, loss_reduction="mean")
    found = training.step(X, target=UNEQUAL)
    assert calls == [2] * 4
    model = new_model()
    losses = [loss(model(x), labels) for x, labels in zip(X.chunk(4), UNEQUAL.chunk(4), strict=True)]
    torch.testing.assert_close(found, torch.stack(losses).mean().detach())


def test_one_microbatch_may_have_any_loss(bundle: Bundle) -> None:
    for loss, target, _ in REFUSED.values():
        if loss is not REFUSED["fixed number of rows"][0] and loss is not REFUSED["random"][0]:
            assert_same(train(bundle, loss, microbatches=1), loss, target, 1e-9)


class OwnLoss(torch.nn.Module):
    """A model that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def test_the_own_loss_of_a_model_is_a_mean_by_definition(tmp_path: Path) -> None:
    model, batch = OwnLoss().double(), torch.export.Dim("batch", min=2, max=64)
    path = tmp_path / "m.stagepack"
    stagepack.export(model, (X, LABELS), out=path, split_at=["last"], dynamic_shapes=({0: batch}, {0: batch}))
    bundle = stagepack.open(path)
    with pytest.raises(OptionError, match=r"batch: aten\.cross_entropy_loss\.default"):
        train(bundle, lambda result, _: result["loss"])
    with pytest.warns(stagepack.errors.MicrobatchWarning):
        training = train(bundle, lambda result, _: result["loss"], batch_dim="batch")
    with pytest.raises(OptionError, match="it uses a result without a batch dimension"):
        training.step(X, LABELS)
    with pytest.warns(stagepack.errors.MicrobatchWarning):
        training = train(bundle, lambda result, _: result["loss"], batch_dim="batch", loss_reduction="mean")
    torch.testing.assert_close(training.step(X, LABELS), model(X, LABELS)["loss"].detach())
