"""Models of the zoo in several processes: gradients, steps and saved bundles are those of one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

import stagepack
from stagepack.partition.cut_options import WeightSharing
from tests.train.batches import (
    Batch,
    Reference,
    build_model,
    is_single,
    joined,
    make_targets,
    microbatches_of,
    new_optimizer,
    precision,
    read_batch,
    reference_step,
    write_batch,
)
from tests.train.processes import run_workers
from tests.zoo.case import Case
from tests.zoo.cases import named

pytestmark = pytest.mark.xdist_group("train")

ARCHITECTURES = named(
    "values-u-net", "values-lazy-conjugates-cross", "state-batch-norm-that-trains",
    "operators-recurrent-layers", "encoders-bert", "encoders-deberta-v2", "decoders-gpt2",
    "decoders-llama-tied", "encoder-decoders-t5", "mixture-of-experts-mixtral", "state-space-mamba",
    "audio-whisper", "vision-vit-classifier", "vision-convnext", "vision-resnet", "vision-swin",
    "multimodal-clip",
)  # fmt: skip
# By the number of processes.
RUNS = {2: ("2:gpipe", "2:1f1b", "4:interleaved-1f1b"), 4: ("4:gpipe", "4:1f1b")}
STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What processes are called with, and what one process gets."""

    case: Case
    model: torch.nn.Module
    references: Sequence[Reference]


def prepare(case: Case, folder: Path, *, shared: WeightSharing = "replicate", steps: int = 1) -> Trained:
    """Write a model in two and in four stages, and its batches; train it in one process."""
    single = is_single(case)
    with precision(single=single):
        model, inputs = build_model(case, single=single)
        two = stagepack.export(
            model,
            tuple(inputs.args),
            inputs.kwargs,
            out=folder / "2.stagepack",
            stages=2,
            shared=shared,
            dynamic_shapes=inputs.dynamic_shapes,
            allow_ops=[case.operators.partition(".")[0]],
        )
        stagepack.recut(two, out=folder / "4.stagepack", stages=4, shared=shared)
        optimizer = new_optimizer(model.parameters())
        references = []
        for number in range(steps):
            microbatches = microbatches_of(inputs, number)
            targets = make_targets(model, microbatches)
            write_batch(folder / f"batch-{number}.safetensors", joined(microbatches), targets)
            reference = reference_step(model, microbatches, targets)
            gradients = {name: gradient.clone() for name, gradient in reference.gradients.items()}
            references.append(Reference(loss=reference.loss, gradients=gradients))
            optimizer.step()
            optimizer.zero_grad()
    return Trained(case=case, model=model, references=references)


def assert_same(trained: Trained, folder: Path, process_count: int, run: str) -> None:
    """Assert that each process has the losses of one process, and all together its gradients."""
    losses = torch.stack([reference.loss for reference in trained.references])
    expected = trained.references[0].gradients
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    tolerance = 1e-5 if is_single(trained.case) else 1e-12
    seen: set[str] = set()
    for rank in range(process_count):
        gradients = load_file(folder / f"{run.replace(':', '-')}-{rank}.safetensors")
        found_losses = gradients.pop("losses")
        torch.testing.assert_close(found_losses[0], losses[0].double(), rtol=tolerance, atol=0)
        torch.testing.assert_close(found_losses, losses[: len(found_losses)].double(), rtol=1e-7, atol=0)
        for name, gradient in gradients.items():
            if name not in expected:
                assert not gradient.any(), name
                continue
            seen.add(name)
            # Gradients that are zero but for rounding, such as those of the biases of keys, are no exacter than others.
            scale = expected[name].abs().max().item()
            error = (gradient - expected[name]).abs().max().item()
            assert error <= tolerance * max(scale, 1e-3 * largest), f"{name}: differs by {error} of {scale}"
    assert {name for name in expected if expected[name].any()} <= seen


def check(
    case: Case, folder: Path, process_count: int, runs: Sequence[str], *, shared: WeightSharing = "replicate"
) -> None:
    """Assert that the first step of some runs is that of one process."""
    trained = prepare(case, folder, shared=shared)
    run_workers(process_count, "architecture", folder, case.operators, *runs)
    for run in runs:
        assert_same(trained, folder, process_count, run)


def name_of(case: Case) -> str:
    """How a case is called in the name of its test."""
    return case.name


@pytest.mark.parametrize(
    "case",
    [pytest.param(*named("values-u-net"), marks=pytest.mark.slow), *named("values-lazy-conjugates-cross")],
    ids=name_of,
)
def test_small_models(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, 2, ("2:gpipe", "4:interleaved-1f1b"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ARCHITECTURES, ids=name_of)
@pytest.mark.parametrize("process_count", RUNS)
def test_architectures(case: Case, process_count: int, tmp_path: Path) -> None:
    check(case, tmp_path, process_count, RUNS[process_count])


@pytest.mark.slow
@pytest.mark.parametrize("case", named("decoders-llama-tied", "vision-swin", "encoder-decoders-t5"), ids=name_of)
@pytest.mark.parametrize("shared", ["replicate", "transmit"])
def test_ten_steps(case: Case, shared: WeightSharing, tmp_path: Path) -> None:
    trained = prepare(case, tmp_path, shared=shared, steps=STEPS)
    run_workers(4, "architecture", tmp_path, case.operators, "4:1f1b:steps")
    assert_same(trained, tmp_path, 4, "4:1f1b")
    assert_the_saved_bundle_answers_as_the_trained_model(trained, tmp_path, 4)


def assert_the_saved_bundle_answers_as_the_trained_model(trained: Trained, folder: Path, process_count: int) -> None:
    """Assert that, bit for bit."""
    weights: dict[str, torch.Tensor] = {}
    for rank in range(process_count):
        weights |= load_file(folder / f"weights-{rank}.safetensors")
    for name, parameter in trained.model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-7)
    tied = set(trained.model.state_dict()) - set(weights)
    assert trained.model.load_state_dict(weights, strict=False).missing_keys == sorted(
        tied, key=list(trained.model.state_dict()).index
    )
    saved = stagepack.open(folder / "4-trained.stagepack")
    saved.verify()
    batch: Batch = read_batch(folder / "batch-0.safetensors")
    with torch.no_grad(), precision(single=is_single(trained.case)):
        expected = trained.model(*batch.args, **batch.kwargs)
    with torch.no_grad():
        answer = stagepack.load(saved)(*batch.args, **batch.kwargs)
    leaves = zip(pytree.tree_leaves(answer), pytree.tree_leaves(expected), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in leaves if isinstance(ours, torch.Tensor))
