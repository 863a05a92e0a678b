"""Grad mode, autocast, branches and loops, and other operators that call a body."""

from typing import Any

import torch
from torch import Tensor

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

CASES: list[Case] = []
row = Rows(CASES, "regions")
_NESTED = "autocast and no_grad around any number of layers, nested, with the cut in the middle"
_WHOLE = "where the whole model is one region"


@row.of(_NESTED, "abcd")
def regions(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.b(self.a(x))
        with torch.autocast("cpu", enabled=False):
            y = self.c(y.float())
        y = self.d(y)
    with torch.no_grad():
        z = self.a(self.b(x))
    return y, z, self.c(z)


@row.of(_NESTED, "abcdefg")
def no_grad_in_autocast_in_no_grad(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    x = self.a(x)
    with torch.no_grad():
        y = self.b(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.c(y)
            with torch.enable_grad():
                z = self.d(y)
            y = self.e(y)
        w = self.f(y.float())
    return self.g(w), z, y


@row.of(_NESTED, "abcd")
def grad_enabled_inside_no_grad(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        y = self.a(x)
        torch.set_grad_enabled(True)
        z = self.b(y)
        torch.set_grad_enabled(False)
        y = self.c(z)
    return y, z, self.d(y)


@row.of(_NESTED, "abcdef")
def around_many_layers(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in (self.a, self.b, self.c, self.d, self.e, self.f):
            x = layer(x).relu() + x
    return x


@row.of(_NESTED, "ab")
def a_weight_used_in_and_out_of_autocast(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = self.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = self.a(self.b(y)) @ self.a.weight
    with torch.autocast("cpu", dtype=torch.float16):
        w = self.b(self.a(x))
    return self.b(y), z, w


@row.of(_NESTED, "abc", held=lambda: {"mean": torch.zeros(4)})
def buffer_written_in_regions(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.a(x)
        with torch.no_grad():
            self.mean.lerp_(y.float().mean(0), 0.5)
        y = self.b(y)
    return self.c(y.float()) + self.mean


@row.of(_WHOLE, "abcd")
def all_in_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.d(self.c(self.b(self.a(x)).relu())).softmax(-1)


@row.of(_WHOLE, "abcd")
def all_in_no_grad(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        y = self.c(self.b(self.a(x)))
        return y, self.d(y)


@row.of(_WHOLE, "abcd")
def all_in_nested_regions(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = self.b(self.a(x))
        with torch.autocast("cpu", enabled=False):
            y = self.c(y.float())
        return self.d(y)


@row.of(_WHOLE, "abcd")
def all_in_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return self.d(self.c(self.b(self.a(x))))


@row.of("`cond`", "abcd", lambda: (torch.ones(2, 4),))
def cond(self: Any, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: self.b(x).sin(), lambda x: self.c(x).cos(), (self.a(x),))
    return self.d(y)


@row.of("`cond`", "abcde", lambda: (torch.ones(2, 4),))
def nested_cond(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    def positive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.cond(y.sum() > 0, lambda y: self.b(y), lambda y: self.c(y) - y, (y,))
        return inner + x, x.clone()

    def negative(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.d(x) * y, y.clone()

    y = self.a(x)
    left, right = torch.cond(x.sum() > 0, positive, negative, (x, y))
    return self.e(left), right


@row("`cond`")
def cond_on_a_size() -> Model:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.d(torch.cond(x.shape[0] > 4, lambda x: self.b(x), lambda x: self.c(x), (self.a(x),)))

    rows = torch.export.Dim("rows", min=2, max=64)
    return Lambda(run, **linears("abcd")), given(torch.randn(3, 4), dynamic=({0: rows},))


@row.of("`while_loop`", "abc", frozen=True)
def while_loop(self: Any, x: Tensor) -> Tensor:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, self.b(y).relu()

    _, y = torch.while_loop(lambda i, _: i < 3, step, (torch.tensor(0), self.a(x)))
    return self.c(y)


@row.of("`while_loop`", "abc")
def branches_and_loops(self: Any, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,))
    _, y = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), y))
    return self.c(y)


@row("`scan`")
def scan() -> Model:
    from torch._higher_order_ops.scan import scan

    def run(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(self.b(carry) + row)
            return carry, carry * 2

        last, every = scan(step, torch.zeros(4), self.a(x))
        return self.c(last), self.d(every)

    return Lambda(run, **linears("abcd")), given(torch.randn(5, 4))


@row("`scan`")
def associative_scan() -> Model:
    from torch._higher_order_ops.associative_scan import associative_scan

    def run(self: Any, x: Tensor) -> Tensor:
        total = associative_scan(lambda a, b: a + b, self.a(x), dim=0, combine_mode="generic")
        return self.c(self.b(total))

    return Lambda(run, **linears("abc")), given(torch.randn(5, 4))


@row("`map`")
def map_over_rows() -> Model:
    from torch._higher_order_ops.map import map as map_rows

    def run(self: Any, x: Tensor) -> Tensor:
        y = map_rows(lambda row, shift: self.b(row).relu() + shift, self.a(x), self.shift)
        return self.c(y)

    return Lambda(run, **linears("abc"), shift=torch.randn(4)), given(torch.randn(5, 4))


@row.of("`map`", "abc", lambda: (torch.randn(3, 2, 4),))
def vmap(self: Any, x: Tensor) -> Tensor:
    y = torch.vmap(lambda row, weight: row @ weight, in_dims=(0, None))(self.a(x), self.b.weight)
    return self.c(self.b(y))


@row.of("`cond`", "abc", lambda: (torch.ones(2, 4),), frozen=True)
def cond_that_draws(self: Any, x: Tensor) -> Tensor:
    """Random numbers are drawn inside the branch, between those of the layers around it."""
    y = self.a(x) + torch.rand(4)
    y = torch.cond(x.sum() > 0, lambda y: y * torch.rand_like(y), lambda y: y.clone(), (self.b(y),))
    return self.c(y) + torch.rand(4)


def _nested_compile_regions(**more: Tensor) -> Model:
    class Block(torch.nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            for name, value in more.items():
                self.register_buffer(name, value.clone())

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            if more:
                self.count.add_(1)
                x = x * self.count
            return self.inner(x).relu() + x

    return torch.nn.Sequential(Block(), Block(), linear(), Block()), given()


def _strictly(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, Inputs]:
    """The model captured by torch's strict way: the other one opens these regions."""
    return torch.export.export(model, inputs.args, strict=True), inputs


@row("`invoke_subgraph`")
def invoke_subgraph() -> tuple[Any, Inputs]:
    return _strictly(*_nested_compile_regions())


# torch 2.11 refuses in-place writes in the subgraphs of both.
@row("`invoke_subgraph`", oldest_torch="2.13")
def invoke_subgraph_that_writes() -> tuple[Any, Inputs]:
    model, inputs = _nested_compile_regions(count=torch.ones(1))
    with torch.no_grad():
        return _strictly(model.requires_grad_(False), inputs)


@row("`invoke_subgraph`", oldest_torch="2.13")
def nested_compile_region_opened() -> Model:
    return _nested_compile_regions(count=torch.ones(1))


@row("`invoke_subgraph`")
def activation_checkpoint() -> Model:
    from torch.utils.checkpoint import checkpoint

    def run(self: Any, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = checkpoint(lambda x, layer=layer: layer(x).relu(), x, use_reentrant=False)
        return x

    return Lambda(run, **linears("abc")), given()


@row("`invoke_subgraph`")
def function_with_its_own_gradient() -> Model:
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(-0.5, 0.5)

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> Tensor:
            return given * 2

    def run(self: Any, x: Tensor) -> Tensor:
        return self.c(Clip.apply(self.b(Clip.apply(self.a(x)))))

    return Lambda(run, **linears("abc")), given()


@row("weights inside subgraphs")
def flex_attention() -> Model:
    from torch.nn.attention.flex_attention import flex_attention

    def run(self: Any, x: Tensor) -> Tensor:
        def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + self.slope[head] * (query - key)

        q, k, v = (layer(x).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (self.a, self.b, self.c))
        return self.d(flex_attention(q, k, v, score_mod=score).transpose(1, 2).flatten(2))

    layers = {name: linear(32) for name in "abcd"}
    return Lambda(run, **layers, slope=torch.randn(2)).requires_grad_(False), given(torch.randn(2, 16, 32))


@row.of("weights inside subgraphs", "abcd")
def tied_weights_inside_branches(self: Any, x: Tensor) -> Tensor:
    """The weight of the branches is that of layers outside, and all branches share another."""
    for layer in (self.a, self.b, self.c):
        pick = layer(x)
        x = torch.cond(pick.sum() > 0, lambda x: self.d(x) @ self.a.weight, lambda x: x @ self.c.weight, (pick,))
    return x


@row.of("weights inside subgraphs", "abcd", held=lambda: {"scale": torch.ones(4)})
def written_weight_inside_a_branch(self: Any, x: Tensor) -> Tensor:
    """The branch reads a buffer that the layers around it write."""
    y = self.a(x)
    self.scale.add_(1)
    y = torch.cond(y.sum() > 0, lambda y: y * self.scale, lambda y: y - self.scale, (self.b(y),))
    y = self.c(y)
    self.scale.mul_(0.5)
    return self.d(y)


@row.of("weights inside subgraphs", "abcd", lambda: (torch.ones(2, 4),), frozen=True)
def regions_inside_a_branch(self: Any, x: Tensor) -> Tensor:
    def positive(x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.b(x).relu()

    y = torch.cond(x.sum() > 0, positive, lambda x: self.c(x).sin(), (self.a(x),))
    return self.d(y)
