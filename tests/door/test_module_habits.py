"""What users of `torch.nn.Module` type works on a loaded bundle, or has an answer."""

import copy
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import OptionError
from tests.door.model import EXAMPLE


def test_a_copy_has_weights_of_its_own(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    duplicate = copy.deepcopy(pipeline)
    for parameter in duplicate.parameters():
        parameter.data.zero_()
    assert not duplicate(EXAMPLE).any()
    assert torch.equal(pipeline(EXAMPLE), exported[1])
    with pytest.raises(OptionError, match="only pipelines in PyTorch"):
        copy.deepcopy(stagepack.load(exported[0], runtime="onnxruntime"))


def test_methods_of_modules_work_or_name_what_takes_their_place(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    assert pipeline.eval() is pipeline
    for name, hint in {
        "half": "--dtype",
        "cuda": r"to\('cuda'\)",
        "train": "stagepack.train",
        "named_modules": "stages",
    }.items():
        with pytest.raises(AttributeError, match=f"Pipeline has no attribute '{name}': .*{hint}"):
            getattr(pipeline, name)
    with pytest.raises(AttributeError, match=r"Pipeline has no attribute 'nothing'$"):
        pipeline.nothing  # noqa: B018 - it raises


@pytest.mark.parametrize("stage", ["1", 1.0, None])
def test_a_stage_that_is_no_number_is_refused(stage: object, exported: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(OptionError, match="stage: expected a number, found "):
        stagepack.load_stage(exported[0], stage)  # type: ignore[call-overload]
