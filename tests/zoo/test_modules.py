"""Every module of every architecture, called on its own, answers as it does in the model, or says why it cannot."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.capture.source import capture_model
from stagepack.errors import InputError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.torch.module_builder import CalledModule
from tests.zoo.called import calls_of, is_equal
from tests.zoo.case import Case
from tests.zoo.cases import ARCHITECTURES
from tests.zoo.test_zoo import name_of, namespaces


@pytest.mark.slow
@pytest.mark.parametrize("case", ARCHITECTURES, ids=name_of)
@torch.no_grad()
def test_every_module_answers_alone(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = case.build()
    bundle = export_capture(
        capture_model(model, inputs), out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=1)
    )
    stage = stagepack.load_stage(bundle, 0, modules=True, types=case.classes(), allow_ops=namespaces(bundle))
    answered: set[str] = set()
    refused: set[str] = set()
    for call in calls_of(model, *inputs.args, **inputs.kwargs):
        module = dict(stage.named_modules()).get(call.name)
        if not isinstance(module, CalledModule) or call.name in answered | refused:
            continue
        assert module is not None
        try:
            found = module(*call.args, **call.kwargs)
        except InputError:  # in an export, transformers makes masks that it leaves out where nothing is masked
            refused.add(call.name)
        else:
            assert is_equal(found, call.result), call.name
            answered.add(call.name)
    assert len(answered) > 2 * len(refused)
