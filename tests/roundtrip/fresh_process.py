"""Bundles of one model in a fresh process, which has torch and stagepack alone: their answers are those of the captured program."""

import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture
from stagepack.format.contract import bind_call
from stagepack.format.reader import Bundle
from stagepack.format.tree import ValueLeaf, leaves_of_tree
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.zoo.case import files, other_size, stages_at_most
from tests.zoo.test_zoo import tensors_sent_for_sizes

Runner = subprocess.Popen[str]


@contextmanager
def started_runner() -> Iterator[Runner]:
    """A process that starts a fresh one for each folder that it is told of."""
    script = Path(__file__).with_name("run_bundle.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def assert_right_in_fresh_process(
    capture: Capture, *, operators: str, stage_counts: Sequence[int], folder: Path, runner: Runner
) -> list[Bundle]:
    """Cut a model, call the bundles in a fresh process with the example, other sizes, and the example again; compare bit for bit."""
    counts = sorted({stages_at_most(count, capture) for count in stage_counts})
    cut_options = [CutOptions(stages=count) for count in counts]
    exported = export_capture(capture, out=folder / f"{counts[0]}.stagepack", cut_options=cut_options[0])
    bundles = [
        exported,
        *(stagepack.recut(exported, out=folder / f"{count}.stagepack", stages=count) for count in counts[1:]),
    ]
    for bundle, count in zip(bundles, counts, strict=True):
        assert len(bundle.stages) == count
        assert not tensors_sent_for_sizes(bundle)
    if len(counts) > 1:  # a cut again gives the bytes of an export
        direct = export_capture(capture, out=folder / "direct", cut_options=cut_options[-1])
        assert files(direct.path) == files(bundles[-1].path)
    signature = bundles[0].entry_point.signature
    calls = [capture.inputs, other_size(capture.program, capture.inputs), capture.inputs]
    expected = _answers(capture.program, calls)
    for number, inputs in enumerate(calls):
        bound = bind_call(signature, tuple(inputs.args), inputs.kwargs)
        tensors = {name: torch.as_tensor(given.value).detach().clone().contiguous() for name, given in bound.items()}
        save_file(tensors, folder / f"inputs-{number}.safetensors")
    print(folder, operators, sep="\t", file=runner.stdin, flush=True)
    assert runner.stdout is not None
    assert runner.stdout.readline() == "0\n"
    value_names = [
        f"output.{index}" for index, leaf in enumerate(leaves_of_tree(signature.result)) if isinstance(leaf, ValueLeaf)
    ]
    for bundle in bundles:
        for number, leaves in enumerate(expected):
            found = load_file(bundle.path.with_suffix(".out") / f"{number}.safetensors")
            named = dict(zip(value_names, leaves, strict=True))
            assert found.keys() == named.keys()
            for name, leaf in named.items():
                wanted = torch.as_tensor(leaf).detach()
                assert found[name].dtype == wanted.dtype
                assert torch.allclose(found[name], wanted, rtol=0, atol=0, equal_nan=True), (
                    f"{bundle.path.name}, call {number}, {name}"
                )
    return bundles


def _answers(program: ExportedProgram, calls: list[Inputs]) -> list[list[object]]:
    """The values in the answers of one module to several calls in a row, without the constants among them."""
    module = program.module()
    outputs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    answers = []
    for inputs in calls:
        torch.manual_seed(0)
        args, kwargs = copy.deepcopy((tuple(inputs.args), dict(inputs.kwargs)))
        with torch.no_grad():
            leaves = copy.deepcopy(pytree.tree_leaves(module(*args, **kwargs)))
        answers.append(
            [leaf for leaf, output in zip(leaves, outputs, strict=True) if not isinstance(output, ConstantArgument)]
        )
    return answers
