"""A tower of residual blocks, small enough for a first try.

Run ``stagepack export stagepack.examples.tower:make --inputs stagepack.examples.tower:inputs -o tower.stagepack``.
"""

import torch

import stagepack


class Block(torch.nn.Module):
    """A residual block: norm, up, GELU, down."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.up = torch.nn.Linear(size, 4 * size)
        self.down = torch.nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return `[rows, size]`."""
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Tower(torch.nn.Module):
    """Blocks in a row, and a scale."""

    def __init__(self, blocks: int = 18, size: int = 64) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(blocks))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Take `[rows, size]`; return it under the key ``y``."""
        for block in self.blocks:
            x = block(x)
        return {"y": x * scale}


def make() -> torch.nn.Module:
    """The model. Its weights are random; load yours here."""
    torch.manual_seed(0)
    return Tower()


def inputs() -> stagepack.Inputs:
    """The example inputs: 4 rows, of any number up to 512."""
    rows = torch.export.Dim("rows", min=1, max=512)
    return stagepack.Inputs(args=(torch.randn(4, 64),), dynamic_shapes={"x": {0: rows}})
