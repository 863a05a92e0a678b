"""Models in ONNX Runtime: exported whole by torch, and as bundles cut in three."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import torch
from onnxruntime import OrtValue
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.programs import Capture
from stagepack.errors import OperatorError
from stagepack.format.graph import Value
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.comparison import compare_arrays
from stagepack_loaders.exchange import to_array
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.onnxruntime.values import to_ort
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.zoo.case import Case, answers, captured_answers, other_size, stages_at_most

RIGHT, DRAWS = "right", "draws random numbers"


class Found(NamedTuple):
    """What became of a model cut in three."""

    answer: str  # `RIGHT`, or what is wrong with it
    torch_only: dict[int, str]  # why stages ran in torch, by their number


def whole(capture: Capture, folder: Path) -> str:
    """Whether the model answers right when torch exports it whole, and if not why not; what it writes aside, which is lost."""
    [wanted] = captured_answers(capture, [capture.inputs])
    outputs = capture.program.graph_signature.output_specs
    kept = [leaf for leaf, spec in zip(wanted, outputs, strict=False) if not isinstance(spec.arg, ConstantArgument)]
    try:
        values = _whole_answer(capture, folder / "whole.onnx")
        return compare(
            [to_array(value, _value_type(leaf), TORCH_ARRAYS) for value, leaf in zip(values, kept, strict=True)], kept
        )
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return said(error)


def _whole_answer(capture: Capture, path: Path) -> list[OrtValue]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(capture.program, dynamo=True, verbose=False)
    assert program is not None
    program.save(path, external_data=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    leaves = pytree.tree_leaves((tuple(capture.inputs.args), dict(capture.inputs.kwargs)))
    specs = [spec for spec in capture.program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    given = [leaf for leaf, spec in zip(leaves, specs, strict=True) if not isinstance(spec.arg, ConstantArgument)]
    names = [one.name for one in session.get_inputs()]
    copies = [to_array(copy.deepcopy(leaf), _value_type(leaf), NUMPY_ARRAYS) for leaf in given]
    values = [to_ort(array, _value_type(leaf).dtype) for array, leaf in zip(copies, given, strict=True)]
    found: list[OrtValue] = session.run_with_ort_values(None, dict(zip(names, values, strict=True)))
    return found


def cut(case: Case, capture: Capture, folder: Path) -> Found:
    """Whether the model answers right when it is cut in three, or fewer: in three calls in a row, and in one with other sizes.

    Stages that have no ONNX form, or that this machine's onnxruntime does not run, run in torch.
    """
    bundle = export_capture(
        capture, out=folder / "m.stagepack", cut_options=CutOptions(stages=stages_at_most(3, capture))
    )
    needed = {name for stage in bundle.stages for name in stage.namespaces}
    added = stagepack.add_onnx(bundle, allow_ops=needed)
    added.bundle.verify()
    torch_only = dict(added.torch_only)
    for number, checked in added.checked.items():
        try:
            stagepack.load_stage(added.bundle, number, runtime="onnxruntime")
        except OperatorError:
            torch_only[number] = checked.reason
    reasons = [checked.reason for checked in added.checked.values()]
    # A stage with half precision inside may differ from torch by as much as torch does from exact numbers.
    rounding = max((checked.rounding or 0.0 for checked in added.checked.values()), default=0.0)
    runtimes = ["torch" if number in torch_only else "onnxruntime" for number in range(len(bundle.stages))]
    pipe = stagepack.load(added.bundle, runtime=runtimes, types=case.classes(), allow_ops=needed)
    other = other_size(capture.program, capture.inputs)
    for calls in [[capture.inputs] * 3, [other]]:
        for found, wanted in zip(answers(pipe, calls), captured_answers(capture, calls), strict=True):
            if (answer := compare(found, wanted, rounding)) != RIGHT:
                return Found(DRAWS if DRAWS in reasons else answer, torch_only)
        pipe.reset_state()
    return Found(RIGHT, torch_only)


def compare(found: Sequence[Any], wanted: Sequence[Any], rounding: float = 0.0) -> str:
    """Whether answers are those that were wanted, within the tolerance of their type or twice a rounding; if not, how far they are off."""
    for mine, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor | bool | int | float):
            assert mine == other
            continue
        expected = torch.as_tensor(other)
        ours = torch.as_tensor(to_array(mine, _value_type(other), TORCH_ARRAYS))
        apart = compare_arrays(
            TORCH_ARRAYS, ours if isinstance(other, torch.Tensor) else ours.to(expected.dtype), expected
        )
        if not apart.within and not apart.largest <= 2 * rounding:
            return f"off by {apart.largest:.3g}"
    return RIGHT


def said(error: BaseException) -> str:
    """What the cause of an error says, in one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _value_type(leaf: object) -> Value:
    """The type of a tensor or a number, as an edge has it."""
    if isinstance(leaf, torch.Tensor):
        return Value(name="leaf", dtype=str(leaf.dtype).removeprefix("torch."), shape=tuple(leaf.shape))
    return Value(
        name="leaf", dtype="symbool" if isinstance(leaf, bool) else "symint" if isinstance(leaf, int) else "symfloat"
    )
