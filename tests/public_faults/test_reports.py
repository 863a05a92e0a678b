"""Faults that users of other tools have reported do not occur here: each model is answered as the model answers, or refused."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import stagepack
from stagepack.errors import CutError, InputError, StagepackError
from stagepack.format.reader import Bundle
from tests.public_faults.report import REPORTS, Report
from tests.zoo.case import assert_equal

for module_name in ("sizes", "values_and_state"):
    importlib.import_module(f"tests.public_faults.{module_name}")

ANSWERED = [report for report in REPORTS if not report.refused]


def name_of(report: Report) -> str:
    return report.name


def calls_of(report: Report) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    example = (tuple(report.example.args), dict(report.example.kwargs))
    return [example, *((arguments, dict(report.example.kwargs)) for arguments in report.calls), example]


def answer_of(run: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """The leaves of the result, and of the inputs afterwards."""
    args, kwargs = copy.deepcopy(call)
    with torch.no_grad():
        return pytree.tree_leaves((run(*args, **kwargs), args, kwargs))


def export(report: Report, folder: Path, **options: Any) -> Bundle:
    torch.manual_seed(0)
    example = report.example
    return stagepack.export(
        report.build(),
        tuple(example.args),
        dict(example.kwargs),
        dynamic_shapes=example.dynamic_shapes,
        out=folder / "m.stagepack",
        overwrite=True,
        **options,
    )


def captured_program_refuses(report: Report, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether torch's own program refuses a call: torch may capture a model for some sizes only."""
    example = report.example
    torch.manual_seed(0)
    program = torch.export.export(
        report.build(), tuple(example.args), dict(example.kwargs), dynamic_shapes=example.dynamic_shapes
    )
    try:
        answer_of(program.module(), call)
    except (AssertionError, RuntimeError):
        return True
    return False


def assert_right(report: Report, pipe: Any, tolerance: float = 0.0) -> None:
    """The pipeline answers as the model does; what the model or torch's program refuses, it refuses, too."""
    torch.manual_seed(0)
    model = report.build()
    for call in calls_of(report):
        try:
            expected = answer_of(model, call)
        except (RuntimeError, ValueError):
            with pytest.raises(StagepackError):
                answer_of(pipe, call)
            continue
        try:
            found = answer_of(pipe, call)
        except InputError:
            assert captured_program_refuses(report, call)
            continue
        if tolerance:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert_equal([found], [expected])


@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
@pytest.mark.parametrize("report", ANSWERED, ids=name_of)
def test_reported_model_is_answered_in_torch(report: Report, tmp_path: Path) -> None:
    try:
        bundle = export(report, tmp_path, stages=2)
    except CutError:  # one operator
        bundle = export(report, tmp_path)
    assert_right(report, stagepack.load(bundle, allow_ops=report.allow_ops))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
@pytest.mark.parametrize("report", [report for report in ANSWERED if report.onnx], ids=name_of)
def test_reported_model_is_answered_in_onnx_runtime_or_stays_in_torch(report: Report, tmp_path: Path) -> None:
    bundle = export(report, tmp_path)
    torch_only = stagepack.add_onnx(bundle).torch_only
    runtime = ["torch" if stage in torch_only else "onnxruntime" for stage in range(len(bundle.stages))]
    assert_right(report, stagepack.load(bundle.path, runtime=runtime), 1e-4)


@pytest.mark.parametrize("report", [report for report in REPORTS if report.refused], ids=name_of)
def test_reported_model_is_refused_by_name(report: Report, tmp_path: Path) -> None:
    with pytest.raises(StagepackError, match=report.refused):
        export(report, tmp_path)
    assert not (tmp_path / "m.stagepack").exists()
