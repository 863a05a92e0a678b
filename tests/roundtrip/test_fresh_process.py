"""Every case, cut into 1, 2 and 3 stages, answers in a fresh process bit for bit as the captured program does."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from stagepack.capture.inputs import Inputs
from stagepack.exporter import export_capture
from stagepack.format.contract import bind_call
from stagepack.format.tree import ValueLeaf, tree_leaves
from stagepack.partition.cut_options import CutOptions
from tests.zoo.case import Case, other_size
from tests.zoo.cases import EXAMPLES, named
from tests.zoo.test_zoo import name_of, slow

CASES = [
    *EXAMPLES,
    *named("encoders-minilm", "decoders-llama-tied", "vision-resnet"),
    *slow(
        named(
            "encoders-bert",
            "decoders-llama",
            "decoders-gpt2",
            "encoder-decoders-t5",
            "vision-vit",
            "mixture-of-experts-mixtral",
            "audio-whisper",
        )
    ),
]
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """Starts a fresh process for each folder that it is told of."""
    script = Path(__file__).with_name("run_bundle.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bit_exact(case: Case, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    capture = case.capture()
    bundles = []
    for stages in STAGES:
        bundles.append(
            export_capture(capture, out=tmp_path / f"{stages}.stagepack", cut_options=CutOptions(stages=stages))
        )
        assert len(bundles[-1].stages) == stages
    signature = bundles[0].entry_point.signature
    calls = [capture.inputs, other_size(capture.program, capture.inputs), capture.inputs]
    expected = _answers(capture.program.module(), calls)
    for number, inputs in enumerate(calls):
        bound = bind_call(signature, tuple(inputs.args), inputs.kwargs)
        tensors = {name: torch.as_tensor(given.value).detach().clone().contiguous() for name, given in bound.items()}
        save_file(tensors, tmp_path / f"inputs-{number}.safetensors")
    print(tmp_path, case.operators, sep="\t", file=runner.stdin, flush=True)
    assert runner.stdout is not None
    assert runner.stdout.readline() == "0\n"
    for bundle in bundles:
        for number, leaves in enumerate(expected):
            found = load_file(bundle.path.with_suffix(".out") / f"{number}.safetensors")
            named = {
                f"output.{index}": leaf
                for index, (tree, leaf) in enumerate(zip(tree_leaves(signature.result), leaves, strict=True))
                if isinstance(tree, ValueLeaf)
            }
            assert found.keys() == named.keys()
            for name, leaf in named.items():
                wanted = torch.as_tensor(leaf).detach()
                assert found[name].dtype == wanted.dtype
                assert torch.equal(found[name], wanted), f"{bundle.path.name}, call {number}, {name}"


def _answers(module: torch.nn.Module, calls: list[Inputs]) -> list[list[object]]:
    """The leaves of the answers of one module to several calls in a row."""
    answers = []
    for inputs in calls:
        torch.manual_seed(0)
        args, kwargs = copy.deepcopy((tuple(inputs.args), dict(inputs.kwargs)))
        with torch.no_grad():
            answers.append(copy.deepcopy(pytree.tree_leaves(module(*args, **kwargs))))
    return answers
