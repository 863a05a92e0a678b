"""Loaded models whose weights were changed are saved."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import OptionError, OutputExistsError
from tests.door.model import EXAMPLE


def test_a_pipeline_with_changed_weights_is_saved(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    pipeline = stagepack.load(exported[0])
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline(EXAMPLE).square().mean().backward()
    optimizer.step()
    expected = pipeline(EXAMPLE).detach()
    assert not torch.equal(expected, exported[1])
    out = tmp_path / "tuned.stagepack"
    out.mkdir()
    with pytest.raises(OutputExistsError, match="choose another name"):
        stagepack.save(pipeline, out=out)
    out.rmdir()
    for overwrite in (False, True):
        saved = stagepack.save(pipeline, out=out, overwrite=overwrite)
        saved.verify(strict=True)
        assert torch.equal(stagepack.load(saved)(EXAMPLE), expected)
    with pytest.raises(OutputExistsError, match="in Python overwrite=True"):
        stagepack.save(pipeline, out=out)
    assert torch.equal(stagepack.load(exported[0])(EXAMPLE), exported[1])


def test_weights_that_cannot_be_changed_are_not_saved(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a pipeline in PyTorch in this process"):
        stagepack.save(stagepack.load(exported[0], runtime="onnxruntime"), out=tmp_path / "m.stagepack")
