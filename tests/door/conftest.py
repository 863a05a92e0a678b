"""A bundle that the tests of this folder share."""

from pathlib import Path

import pytest
import torch

import stagepack
from tests.door.model import EXAMPLE, Scale
from tests.made_once import made_once


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A bundle of two stages with ONNX models, and the model's answer to the example."""
    torch.manual_seed(0)
    model = Scale().eval()

    def make(folder: Path) -> None:
        stagepack.add_onnx(stagepack.export(model, (EXAMPLE,), out=folder / "m.stagepack", stages=2))

    return made_once(tmp_path_factory, "exported", make) / "m.stagepack", model(EXAMPLE).detach()
