"""Weights keep the order of their elements in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from tests.modules import module_of


@pytest.mark.parametrize(
    "options", [{}, {"stream": True}, {"device_memory": "64MB"}], ids=["mapped", "streamed", "window"]
)
def test_weights_that_are_channels_last_keep_the_strides_of_size_1(options: dict[str, Any], tmp_path: Path) -> None:
    """Convolutions choose the memory format of their results by them; view fails where it is another one."""
    layers = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 5, padding=2, groups=64), torch.nn.Conv2d(64, 64, 1))
    model = module_of(lambda self, x: self.layers(x).permute(0, 2, 3, 1).view(len(x), -1), layers=layers).eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 64, 17, 17)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", stages=2)
    pipe = stagepack.load(bundle, **options)
    assert torch.equal(pipe(x), model(x))
    assert [weight.stride() for weight in pipe.state_dict().values()] == [
        weight.stride() for weight in model.state_dict().values()
    ]
