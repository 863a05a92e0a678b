"""A bundle that the tests of this folder share."""

from pathlib import Path

import pytest
import torch

import stagepack
from tests.door.model import EXAMPLE, Scale


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A bundle of two stages with ONNX models, and the model's answer to the example."""
    torch.manual_seed(0)
    model = Scale().eval()
    path = tmp_path_factory.mktemp("exported") / "m.stagepack"
    stagepack.export(model, (EXAMPLE,), out=path, stages=2)
    stagepack.add_onnx(path)
    return path, model(EXAMPLE).detach()
