"""Small models, each with one trait that a cut or a file could lose; whole and cut they answer as the model does, three calls in a row."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture import Capture, Inputs, capture_module, capture_program
from stagepack.exporter import export_capture
from stagepack.where import Where
from stagepack_loaders.torch.build import named

Build = Callable[[], tuple[torch.nn.Module, Inputs]]
BUILDS: dict[str, Build] = {}


def model(build: Build) -> Build:
    """Register a model to be tested."""
    BUILDS[build.__name__] = build
    return build


class Lambda(torch.nn.Module):
    """A module made of a function, with layers and buffers that hang on it."""

    def __init__(self, function: Callable[..., Any], **held: torch.nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, value in held.items():
            if isinstance(value, torch.nn.Parameter | torch.nn.Module):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _linear(size: int = 4) -> torch.nn.Linear:
    return torch.nn.Linear(size, size)


@model
def skip_over_stages() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first).relu()).relu()) + first + x

    return Lambda(run, a=_linear(), b=_linear(), c=_linear(), d=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def input_used_late_and_output_made_early() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor, late: torch.Tensor, unused: torch.Tensor) -> tuple[Any, ...]:
        early = self.a(x)
        out = self.c(self.b(early)) + late
        return early, out, out, late, 7, None, "text", 2.5

    return Lambda(run, a=_linear(), b=_linear(), c=_linear()), Inputs(
        args=(torch.randn(2, 4), torch.randn(4), torch.randn(3))
    )


@model
def output_is_weight() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": self.b(self.a(x)), "weight": self.a.weight, "buffer": self.table}

    return Lambda(run, a=_linear(), b=_linear(), table=torch.arange(4)), Inputs(args=(torch.randn(2, 4),))


@model
def tied_at_both_ends() -> tuple[torch.nn.Module, Inputs]:
    embed, head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16, bias=False)
    head.weight = embed.weight

    def run(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(ids)))

    return Lambda(run, embed=embed, middle=_linear(), head=head), Inputs(args=(torch.randint(0, 16, (2, 3)),))


@model
def module_called_three_times() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(self.b(self.a(x)))))

    return Lambda(run, a=_linear(), b=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def views_of_one_storage() -> tuple[torch.nn.Module, Inputs]:
    whole = torch.randn(8, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.top + self.a(x)
        return y @ self.turned[:, :4] @ self.gaps @ self.turned_alone + self.overlap.sum(0) + self.wide

    held = {"top": whole[:4], "turned": whole.t(), "overlap": whole[2:6], "wide": torch.randn(1).expand(4)}
    held |= {"gaps": torch.randn(4, 8)[:, ::2], "turned_alone": torch.randn(4, 4).t()}
    return Lambda(run, a=_linear(), **held), Inputs(args=(torch.randn(2, 4),))


@model
def dtypes() -> tuple[torch.nn.Module, Inputs]:
    names = [
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "uint8",
        "int16",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    held = {f"in_{name}": torch.ones(3).to(getattr(torch, name)) for name in names}
    held |= {"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 4)}

    def run(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.a(x).sum() * self.scalar + self.empty.sum()
        return [y, *(getattr(self, f"in_{name}").clone() for name in names)]

    return Lambda(run, a=_linear(), **held), Inputs(args=(torch.randn(2, 4),))


@model
def batch_norm_that_trains() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.b(self.first(self.a(x)).relu()))

    layers = {"a": _linear(), "first": torch.nn.BatchNorm1d(4), "b": _linear(), "second": torch.nn.BatchNorm1d(4)}
    return Lambda(run, **layers).train(), Inputs(args=(torch.randn(5, 4),))


@model
def counter() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.count.add_(1)
        return self.c(self.b(y) * self.count)

    return Lambda(run, a=_linear(), b=_linear(), c=_linear(), count=torch.zeros(1)), Inputs(args=(torch.randn(2, 4),))


@model
def cache_by_index_copy() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, position, self.a(x))
        return self.b(self.cache).sum(0)

    held = {"a": _linear(), "b": _linear(), "cache": torch.zeros(6, 4)}
    return Lambda(run, **held), Inputs(args=(torch.randn(1, 4), torch.tensor([2])))


@model
def inputs_written() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        state.add_(1)
        return self.b(y) + state

    return Lambda(run, a=_linear(), b=_linear()), Inputs(args=(torch.randn(2, 4), torch.zeros(4)))


@model
def activation_written_in_place() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        view = y[:, :2]
        z = self.b(y)
        view.mul_(2)
        return self.c(z) + y

    return Lambda(run, a=_linear(), b=_linear(), c=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def regions() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(self.a(x))
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float())
            y = self.d(y)
        with torch.no_grad():
            z = self.a(self.b(x))
        return y, z, self.c(z)

    return Lambda(run, a=_linear(), b=_linear(), c=_linear(), d=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def branches_and_loops() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,))
        _, y = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), y))
        return self.c(y)

    return Lambda(run, a=_linear(), b=_linear(), c=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def arithmetic_on_sizes() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = self.a(x)
        half = x.shape[1] // 2
        joined = torch.cat([x[:, :half], x[:, half:], y], dim=1)
        return self.b(joined) + torch.arange(joined.shape[1]).unsqueeze(-1), joined.shape[1] * 2

    half = Dim("half", min=2, max=16)
    inputs = Inputs(
        args=(torch.randn(2, 6, 4), torch.randn(2, 12, 4)),
        dynamic_shapes=(({0: None, 1: 2 * half}, {0: None, 1: 4 * half}),),
    )
    return Lambda(run, a=_linear(), b=_linear()), inputs


@model
def sizes_from_data() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = count.item()
        torch._check(n >= 1)
        torch._check(n <= 4)
        picked = self.a(x).narrow(0, 0, n)
        return self.b(picked), self.c(x)[x.sum(1) > 0]

    return Lambda(run, a=_linear(), b=_linear(), c=_linear()), Inputs(args=(torch.randn(4, 4), torch.tensor(3)))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Point, serialized_type_name="tests.Point")


@model
def containers() -> tuple[torch.nn.Module, Inputs]:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _linear(), _linear()

        def forward(self, batch: dict[str, list[torch.Tensor]], pair: Pair, *, point: Point, scale: float = 2.0) -> Any:
            x = self.a(batch["x"][0]) + batch["x"][1] + pair.left * pair.right
            y = self.b(x) * scale
            result = collections.OrderedDict(pair=Pair(x, y), point=Point(y, x), many=[(x,), {3: y}])
            return result, collections.deque([x, y], maxlen=5)

    batch = {"x": [torch.randn(2, 4), torch.randn(2, 4)]}
    kwargs = {"point": Point(torch.randn(2), torch.randn(2))}
    return Nested(), Inputs(args=(batch, Pair(torch.randn(4), torch.randn(4))), kwargs=kwargs)


@model
def dropout_that_draws() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.b(self.a(x)), 0.5) + torch.rand(4)

    return Lambda(run, a=_linear(), b=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def several_results() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top, _, rest = self.a(x).split([1, 1, 2], dim=1)
        values, indices = self.b(x).max(dim=1)
        return torch.cat(torch.chunk(self.c(x), 2, dim=1)[::-1], dim=1), top, rest, values, indices

    return Lambda(run, a=_linear(), b=_linear(), c=_linear()), Inputs(args=(torch.randn(2, 4),))


@model
def memory_formats() -> tuple[torch.nn.Module, Inputs]:
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    return convolutions.to(memory_format=torch.channels_last), Inputs(
        args=(torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),)
    )


@model
def text_arguments() -> tuple[torch.nn.Module, Inputs]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.a(x), approximate="tanh")
        return (
            torch.einsum("bi,ij->bj", self.b(y), self.a.weight)
            + float("inf") * 0.0
            + torch.full((4,), float("-inf")).exp()
        )

    return Lambda(run, a=_linear(), b=_linear()), Inputs(args=(torch.randn(2, 4),))


def answers(run: Callable[..., Any], inputs: Inputs, calls: int = 3) -> list[list[Any]]:
    """The leaves of several answers in a row, with those of the inputs after each call."""
    found = []
    args, kwargs = copy.deepcopy((tuple(inputs.args), dict(inputs.kwargs)))
    for _ in range(calls):
        torch.manual_seed(0)
        with torch.no_grad():
            result = run(*args, **kwargs)
        found.append(
            copy.deepcopy(
                [
                    leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
                    for leaf in pytree.tree_leaves((result, args))
                ]
            )
        )
    return found


def assert_equal(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Assert that answers are the same bit for bit."""
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert type(mine) is type(other)
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == other.dtype
                assert mine.stride() == other.stride()
                torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert mine == other


@functools.cache
def captured(name: str) -> Capture:
    torch.manual_seed(0)
    return capture_module(*BUILDS[name]())


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", BUILDS)
def test_answers_as_the_model_does(name: str, stages: int, tmp_path: Path) -> None:
    capture = captured(name)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", where=Where(stages=stages))
    bundle.verify()
    pipe = stagepack.load(bundle, types=[Pair, Point])
    assert_equal(answers(pipe, capture.inputs), answers(capture.program.module(), capture.inputs))


@pytest.mark.parametrize("name", ["counter", "inputs_written", "batch_norm_that_trains", "skip_over_stages"])
def test_functional_programs_write_their_state_back(name: str, tmp_path: Path) -> None:
    capture = captured(name)
    program = capture.program.run_decompositions({})
    bundle = export_capture(
        capture_program(program, capture.inputs), out=tmp_path / "m.stagepack", where=Where(stages=1)
    )
    assert_equal(answers(stagepack.load(bundle), capture.inputs), answers(program.module(), capture.inputs))


def test_every_dtype_of_the_format_is_torchs() -> None:
    from stagepack.format.dtypes import ITEM_SIZE

    for name, size in ITEM_SIZE.items():
        assert named(name, torch.dtype).itemsize == size
