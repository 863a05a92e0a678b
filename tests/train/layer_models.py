"""A model of equal layers, and the memory that its training takes: ``python -m tests.train.layer_models BUNDLE RECOMPUTE``."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, and not in its type hints

import stagepack

LAYERS = 16


class Layer(torch.nn.Module):
    """A layer whose output is of the dtype of its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, width]` to `[batch, width]`."""
        return x + self.dropout(self.second(torch.nn.functional.gelu(self.first(self.norm(x))))).to(x.dtype)


class LayerModel(torch.nn.Module):
    """Equal layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(width, dropout) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, width]` to `[batch, width]`."""
        for layer in self.layers:
            x = layer(x)
        return x


def export_layers(path: Path, *, width: int, dtype: torch.dtype = torch.float64, dropout: float = 0.3) -> None:
    """Export the model in two stages."""
    model = LayerModel(width, dropout).to(dtype)
    shapes = ({0: torch.export.Dim("batch", min=2, max=2**20)},)
    stagepack.export(model, (torch.randn(4, width, dtype=dtype),), out=path, stages=2, dynamic_shapes=shapes)


def main() -> None:
    """Write the largest memory that a step takes, in bytes."""
    recompute: Any = None if sys.argv[2] == "none" else sys.argv[2]
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = stagepack.train(
        sys.argv[1], torch.nn.functional.mse_loss, microbatches=1, schedule="looped-bfs", recompute=recompute
    )
    x = torch.randn(2**12, 256, dtype=torch.float64)
    training.step(x, target=x)
    # Not ru_maxrss, which begins with that of the process that started this one.
    [peak_kib] = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    sys.stdout.write(str(int(peak_kib) * 1024))


if __name__ == "__main__":
    main()
