"""The bundles that the servers of these tests serve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop

import stagepack
from tests.zoo.architectures.encoders import minilm_encoder_folder

ROWS = torch.export.Dim("rows", min=1, max=64)


class Skips(torch.nn.Module):
    """Values skip a stage; results are named twice, nested, and an input as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *, weight: torch.Tensor) -> Any:
        a = self.first(x)
        b = self.second(a).tanh()
        c = self.third(b) + a * weight
        return {"y": c, "again": c, "x": x, "parts": (a, b)}


class Half(torch.nn.Module):
    """Two layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x).relu())


class Kinds(torch.nn.Module):
    """All kinds of values in, over the cut, and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, flag: Any, count: Any, factor: Any) -> Any:
        twice_batch = x.shape[0] * 2
        waves = torch.complex(self.first(x), x)
        y = self.second(waves.real) * factor + twice_batch
        return {
            "waves": waves * 1j,
            "no": ~flag,
            "more": count + 1,
            "number": twice_batch,
            "factor": factor * 2,
            "y": y,
        }


class Back(torch.nn.Module):
    """A view that needs the strides which its input had in the model."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.permute(1, 2, 0).view(6, 4) * 2


class Strided(torch.nn.Module):
    """What crosses the cut is no dense tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.back = torch.nn.Linear(4, 4), Back()

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.back(self.first(x).permute(2, 0, 1))}


class Counting(torch.nn.Module):
    """Adds up what it is given, in each of two stages."""

    first: torch.Tensor
    second: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        self.first.add_(x)
        y = self.first * 2
        self.second.add_(y)
        return {"sum": self.first + 0, "other": self.second * 1}


class Alias(torch.nn.Module):
    """Gives out what it keeps, as it is and as a view."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 100_000))

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x)
        return {"itself": self.total, "view": self.total[1:]}


class First(torch.nn.Module):
    """Takes a number."""

    def forward(self, x: torch.Tensor, n: int) -> Any:
        return x[:n] * 1


class Singles(torch.nn.Module):
    """Of each row, an input, what crosses the cut, and a result are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(1, 4)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = self.first(x)[:, 0] * weight
        return {"y": y, "z": self.second(y[:, None])}


class Together(torch.nn.Module):
    """Its rows do not keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.layer(x - x.mean(0, keepdim=True))}


class Slow(torch.nn.Module):
    """Takes a while: as many products as the first input says."""

    def __init__(self) -> None:
        super().__init__()
        # The values stay near 1: denormal numbers, to which smaller weights lead, take 50 times as long on some processors.
        self.register_buffer("weight", torch.full((512, 512), 1 / 256))

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> Any:
        def step(remaining: int, value: Any) -> Any:
            return remaining - 1, torch.tanh(value @ self.weight)

        return while_loop(lambda remaining, value: remaining > 0, step, (times.clone(), x))[1]


def export_all(folder: Path) -> Mapping[str, Path]:
    """The bundles by name, written into a folder."""
    torch.manual_seed(0)
    rows = {0: ROWS}
    examples = {
        "skips": (Skips(), (torch.randn(4, 8),), {"weight": torch.randn(4, 1)}, {"x": rows, "weight": rows}, 3),
        "half": (Half(), (torch.randn(4, 16, dtype=torch.bfloat16),), {}, {"x": rows}, 2),
        "kinds": (
            Kinds(),
            (torch.randn(4, 4), torch.tensor([True, False]), torch.tensor([1, 2], dtype=torch.int8), torch.tensor(0.5)),
            {},
            {"x": rows, "flag": None, "count": None, "factor": None},
            ["second"],
        ),
        "strided": (Strided(), (torch.randn(2, 3, 4),), {}, None, ["back"]),
        "counting": (Counting(), (torch.ones(3),), {}, None, 2),
        "alias": (Alias(), (torch.ones(1),), {}, None, 1),
        "first": (First(), (torch.ones(9), 4), {}, {"x": None, "n": torch.export.Dim.DYNAMIC(min=2, max=8)}, 1),
        "singles": (Singles(), (torch.randn(4, 4), torch.rand(4)), {}, {"x": rows, "weight": rows}, ["second"]),
        "together": (Together(), (torch.randn(4, 4),), {}, {"x": rows}, 1),
    }
    paths = {}
    for bundle_name, (model, args, kwargs, shapes, cut) in examples.items():
        paths[bundle_name] = folder / f"{bundle_name}.stagepack"
        cut_options = {"stages": cut} if isinstance(cut, int) else {"split_at": cut}
        stagepack.export(model, args, kwargs, out=paths[bundle_name], dynamic_shapes=shapes, **cut_options)
    stagepack.add_onnx(paths["skips"])
    paths["minilm"] = folder / "minilm.stagepack"
    stagepack.export(minilm_encoder_folder(), out=paths["minilm"], stages=2)
    return paths
