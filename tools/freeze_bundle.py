"""Write the frozen bundles of the present format version to `schema/frozen/VERSION`; they are never edited afterwards.

Weights and inputs are small whole numbers, so that every machine and every version of torch answers bit for bit alike.
"""

from pathlib import Path

import torch

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_module
from stagepack.format.manifest import VERSION
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack.roads.onnx import add_onnx

FROZEN = Path(__file__).parents[1] / "schema" / "frozen"


class Block(torch.nn.Module):
    """One of many alike, so that the bundle has a region: whole numbers stay whole."""

    def __init__(self, shift: int) -> None:
        """Give it a weight of its own."""
        super().__init__()
        self.shift = torch.nn.Parameter(torch.full((4,), float(shift)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix a little."""
        return x + (x.relu() + self.shift).remainder(5).neg().abs() * 2


class Counting(torch.nn.Module):
    """Tied and transposed weights, a buffer that is written, a branch, two regions, a skip, and nested containers."""

    calls: torch.Tensor
    offsets: torch.Tensor

    def __init__(self) -> None:
        """Give every weight whole numbers."""
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.blocks = torch.nn.ModuleList([Block(number) for number in range(8)])
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("offsets", torch.arange(3), persistent=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(32).reshape(8, 4) % 5 - 2)
            self.middle.weight.copy_(torch.arange(16).reshape(4, 4) % 3 - 1)
            self.middle.bias.copy_(torch.arange(4))

    def forward(self, batch: dict[str, torch.Tensor], *, scale: int = 2) -> dict[str, object]:
        """Answer with the logits, a view, the number of calls, and a constant."""
        early = self.embed(batch["ids"] % 8)
        for block in self.blocks:
            early = block(early)
        hidden = self.middle(early) * scale
        hidden = torch.cond(batch["flag"], lambda x: x.relu(), lambda x: x.neg(), (hidden,))
        with torch.no_grad():
            turned = hidden @ self.turned + self.offsets
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.head(hidden + early)
        self.calls.add_(1)
        return {"logits": logits, "more": [turned[:, -1:], self.calls * 1, "constant"]}


class Tower(torch.nn.Module):
    """Blocks between linear layers, and a buffer that is written: all of it has an ONNX form."""

    total: torch.Tensor

    def __init__(self) -> None:
        """Give every weight whole numbers."""
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList([Block(number) for number in range(6)])
        self.last = torch.nn.Linear(4, 2, bias=False)
        self.register_buffer("total", torch.zeros(2))
        with torch.no_grad():
            self.first.weight.copy_(torch.arange(16).reshape(4, 4) % 3 - 1)
            self.first.bias.copy_(torch.arange(4))
            self.last.weight.copy_(torch.arange(8).reshape(2, 4) % 4 - 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Answer with the result, and with the sum of it and of those before it."""
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        result = self.last(hidden)
        self.total.add_(result.sum((0, 1)))
        return result, self.total * 1


def main() -> None:
    """Write the bundles."""
    rows, length = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    batch = {"ids": torch.arange(6).reshape(2, 3), "flag": torch.tensor(True)}
    shapes = {"batch": {"ids": {0: rows, 1: length}, "flag": {}}}
    capture = capture_module(Counting(), Inputs(args=(batch,), dynamic_shapes=shapes))
    (FROZEN / VERSION).mkdir(exist_ok=True)
    bundle = export_capture(capture, out=FROZEN / VERSION / "counting.stagepack", cut_options=CutOptions(stages=3))
    print(f"wrote {bundle.path.relative_to(FROZEN)}")
    x = torch.arange(24.0).reshape(2, 3, 4) % 5 - 2
    capture = capture_module(Tower(), Inputs(args=(x,), dynamic_shapes={"x": {0: rows, 1: length}}))
    bundle = export_capture(capture, out=FROZEN / VERSION / "tower.stagepack", cut_options=CutOptions(stages=3))
    added = add_onnx(bundle)
    assert not added.torch_only
    print(f"wrote {bundle.path.relative_to(FROZEN)}")


if __name__ == "__main__":
    main()
