"""The bundles that the servers of these tests serve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop

import stagepack
from tests.modules import module_of
from tests.zoo.architectures.encoders import minilm_encoder_folder

ROWS = torch.export.Dim("rows", min=1, max=64)
Bundles = Mapping[str, Path]


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


def half() -> torch.nn.Module:
    """Two layers in bfloat16."""
    first, second = (torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2))
    return module_of(lambda self, x: self.second(self.first(x).relu()), first=first, second=second)


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


def strided() -> torch.nn.Module:
    """What crosses the cut is no dense tensor, and a view needs the strides which its input had in the model."""
    back = module_of(lambda self, x: x.permute(1, 2, 0).view(6, 4) * 2)
    first = torch.nn.Linear(4, 4)
    return module_of(lambda self, x: {"y": self.back(self.first(x).permute(2, 0, 1))}, first=first, back=back)


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


class Singles(torch.nn.Module):
    """Each row has one number as an input, one that crosses the cut, and one as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(1, 4)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = self.first(x)[:, 0] * weight
        return {"y": y, "z": self.second(y[:, None])}


class Means(torch.nn.Module):
    """The second stage gets a mean of each row, and how many numbers it is a mean of, which no tensor says that crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(1, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.second(self.first(x.mean(1, keepdim=True)).tanh()) * x.shape[1]}


def export_means(path: Path) -> Path:
    """A bundle that is cut where a number crosses."""
    torch.manual_seed(0)
    sizes = {0: ROWS, 1: torch.export.Dim("length", min=2, max=64)}
    stagepack.export(Means(), (torch.randn(4, 6),), out=path, split_at=["second"], dynamic_shapes={"x": sizes})
    return path


def together() -> torch.nn.Module:
    """Its rows do not keep apart."""
    return module_of(lambda self, x: {"y": self.layer(x - x.mean(0, keepdim=True))}, layer=torch.nn.Linear(4, 4))


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


def export_slow(path: Path, model: Slow) -> Path:
    """A bundle whose calls take as long as an input says."""
    path.parent.mkdir(exist_ok=True)
    stagepack.export(model, (torch.ones(256, 512), torch.tensor(2)), out=path, stages=1)
    return path


def export_all(folder: Path) -> None:
    torch.manual_seed(0)
    rows, first = {0: ROWS}, module_of(lambda self, x, n: x[:n] * 1)
    examples = {
        "skips": (Skips(), (torch.randn(4, 8),), {"weight": torch.randn(4, 1)}, {"x": rows, "weight": rows}, 3),
        "half": (half(), (torch.randn(4, 16, dtype=torch.bfloat16),), {}, {"x": rows}, 2),
        "kinds": (
            Kinds(),
            (torch.randn(4, 4), torch.tensor([True, False]), torch.tensor([1, 2], dtype=torch.int8), torch.tensor(0.5)),
            {},
            {"x": rows, "flag": None, "count": None, "factor": None},
            ["second"],
        ),
        "strided": (strided(), (torch.randn(2, 3, 4),), {}, None, ["back"]),
        "counting": (Counting(), (torch.ones(3),), {}, None, 2),
        "alias": (Alias(), (torch.ones(1),), {}, None, 1),
        "first": (first, (torch.ones(9), 4), {}, {"x": None, "n": torch.export.Dim.DYNAMIC(min=2, max=8)}, 1),
        "singles": (Singles(), (torch.randn(4, 4), torch.rand(4)), {}, {"x": rows, "weight": rows}, ["second"]),
        "together": (together(), (torch.randn(4, 4),), {}, {"x": rows}, 1),
    }
    for bundle_name, (model, args, kwargs, shapes, cut) in examples.items():
        out = folder / f"{bundle_name}.stagepack"
        cut_options = {"stages": cut} if isinstance(cut, int) else {"split_at": cut}
        stagepack.export(model, args, kwargs, out=out, dynamic_shapes=shapes, **cut_options)
    stagepack.add_onnx(folder / "skips.stagepack")
    stagepack.export(minilm_encoder_folder(), out=folder / "minilm.stagepack", stages=2)
