"""Where opt_einsum is installed, torch orders the contractions of einsum by it, and sizes may change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack

pytest.importorskip("opt_einsum", reason="make test-libraries installs it")


class Contraction(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands: Any = (x, [0, 1, 2], y, [0, 3, 2], z, [0, 3, 4], [0, 1, 4])
        return torch.einsum("bnd,bmd,bme->bne", x, y, z), torch.einsum(*operands)


def test_the_sizes_of_an_einsum_of_three_tensors_may_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    length = Dim("length", min=4, max=64)
    y, z = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    bundle = stagepack.export(
        Contraction(), (torch.randn(2, 16, 4), y, z), out=tmp_path / "m.stagepack", dynamic_shapes={"x": {1: length}}
    )
    assert [(symbol.min, symbol.max) for symbol in bundle.entry_point.symbols] == [(4, 64)]
    pipe = stagepack.load(bundle)
    x = torch.randn(2, 16, 4)
    assert all(map(torch.equal, pipe(x, y, z), Contraction()(x, y, z)))
    # At another size, torch may order the contractions in another way.
    x = torch.randn(2, 40, 4)
    torch.testing.assert_close(pipe(x, y, z), Contraction()(x, y, z))
