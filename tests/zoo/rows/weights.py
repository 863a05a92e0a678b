"""Weights that share memory, or are of unusual kinds."""

from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

CASES: list[Case] = []
row = Rows(CASES, "weights")


@row("tied embeddings at both ends")
def tied_at_both_ends() -> Model:
    embed, head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16, bias=False)
    head.weight = embed.weight

    def run(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.c(self.b(self.a(self.embed(ids)))))

    return Lambda(run, embed=embed, **linears("abc"), head=head), given(torch.randint(0, 16, (2, 3)))


@row("tied embeddings at both ends")
def tied_and_renormed() -> Model:
    """The embedding shrinks the rows that it looks up, in place, and the head uses them."""
    embed, head = torch.nn.Embedding(16, 4, max_norm=0.5), torch.nn.Linear(4, 16, bias=False)
    head.weight = embed.weight

    def run(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(self.embed(ids))))

    return Lambda(run, embed=embed, **linears("ab"), head=head), given(torch.randint(0, 16, (2, 3)))


@row.of("one submodule called three times", "ab")
def module_called_three_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(self.b(self.a(self.b(self.a(x)))))


@row("one submodule under two names")
def module_under_two_names() -> Model:
    shared = torch.nn.Sequential(linear(), torch.nn.LayerNorm(4))

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.first(self.a(x))))

    return Lambda(run, first=shared, **linears("ab"), last=shared), given()


_VIEWS = "transposed, expanded and overlapping views of one storage (aliasing is there again after loading)"


@row(_VIEWS)
def views_of_one_storage() -> Model:
    whole = torch.randn(8, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.top + self.a(x)
        return y @ self.turned[:, :4] @ self.gaps @ self.turned_alone + self.overlap.sum(0) + self.wide

    held = {"top": whole[:4], "turned": whole.t(), "overlap": whole[2:6], "wide": torch.randn(1).expand(4)}
    held |= {"gaps": torch.randn(4, 8)[:, ::2], "turned_alone": torch.randn(4, 4).t()}
    return Lambda(run, a=linear(), **held), given()


@row(_VIEWS)
def view_written_and_another_read() -> Model:
    whole = torch.randn(6, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.top.add_(1)
        return self.c(self.b(y) + self.overlap.sum(0)) @ self.turned[:, :4]

    return Lambda(run, **linears("abc"), top=whole[:3], overlap=whole[2:], turned=whole.t()), given()


@row(_VIEWS)
def view_read_and_another_written_late() -> Model:
    whole = torch.randn(6, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x) * self.overlap.sum(0))
        z = self.d(self.c(y))
        self.top.mul_(0.5)
        return z

    return Lambda(run, **linears("abcd"), top=whole[:3], overlap=whole[2:]), given()


@row(_VIEWS)
def parameter_and_a_buffer_that_writes_it() -> Model:
    """A buffer lies on the memory of a parameter: other entries of the weight table, the same numbers."""
    layers = linears("abc")
    window = layers["c"].weight.detach()[1:3]

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.window.add_(1)
        return self.c(self.b(y))

    return Lambda(run, **layers, window=window), given()


@row(_VIEWS)
def expanded_and_written() -> Model:
    """Every element of the wide view is the one number that the narrow view writes."""
    one = torch.ones(1)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.narrow.mul_(3)
        return self.c(self.b(y) * self.wide)

    return Lambda(run, **linears("abc"), narrow=one, wide=one.expand(4)), given()


@row(_VIEWS)
def types_on_one_storage() -> Model:
    whole = torch.randn(8)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.numbers[:4]
        self.bits.bitwise_and_(0x7FFFFFFF)
        return self.c(self.b(y) + self.numbers[4:])

    return Lambda(run, **linears("abc"), numbers=whole, bits=whole.view(torch.int32)), given()


_DTYPES = "float16 bfloat16 float64 int8 uint8 int16 bool complex64 complex128 float8_e4m3fn float8_e5m2"
_MORE_DTYPES = "int32 int64 uint16 uint32 uint64 complex32 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"


def _of_dtypes(names: str) -> Model:
    held = {f"in_{name}": torch.ones(3).to(getattr(torch, name)) for name in names.split()}

    def run(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.a(x).sum() * self.scalar, *(getattr(self, name).clone() for name in held)]

    return Lambda(run, a=linear(), **held, scalar=torch.tensor(2.0)), given()


@row("fp16, bf16, fp8, int8, bool, complex")
def dtypes() -> Model:
    return _of_dtypes(_DTYPES)


@row("fp16, bf16, fp8, int8, bool, complex")
def more_dtypes() -> Model:
    return _of_dtypes(_MORE_DTYPES)


@row.of(
    "fp16, bf16, fp8, int8, bool, complex",
    "",
    held=lambda: {
        "a": linear().bfloat16(),
        "b": linear().half(),
        "c": linear(),
        "scale": torch.ones(4).to(torch.float8_e5m2),
        "small": torch.arange(4, dtype=torch.int8),
    },
)
def half_precision_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x.bfloat16()).half())
    return self.c((y * self.scale.to(y.dtype) + self.small).float())


@row.of(
    "0-dim and empty tensors",
    "abc",
    lambda: (torch.randn(2, 4), torch.tensor(0.5)),
    held=lambda: {
        "scalar": torch.nn.Parameter(torch.tensor(2.0)),
        "empty": torch.zeros(0, 4),
        "nothing": torch.zeros(3, 0),
    },
)
def scalars_and_empty_tensors(self: Any, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = self.a(x) * self.scalar + self.empty.sum()
    z = self.b(y)
    return self.c(z) * factor, z[:, 4:], y.sum(), torch.cat([self.empty, z]), self.nothing


_SEVERAL = "A weight used in several stages"


@row.of(_SEVERAL, "abcd", held=lambda: {"turn": torch.nn.Parameter(torch.randn(4, 4)), "scale": torch.randn(4)})
def weight_used_in_every_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (self.a, self.b, self.c, self.d):
        x = layer(x) @ self.turn * self.scale
    return x


@row.of(_SEVERAL, "abc", held=lambda: {"scale": torch.nn.Parameter(torch.randn(4))})
def written_weight_used_in_every_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.scale.mul_(1.5)
    for layer in (self.a, self.b, self.c):
        x = layer(x) * self.scale
    return x


@row.of(_SEVERAL, "abc", held=lambda: {"scale": torch.randn(4)})
def written_between_uses(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x) * self.scale
    self.scale.add_(1)
    x = self.b(x) * self.scale
    self.scale.mul_(2)
    return self.c(x) * self.scale


@row.of(
    "one submodule under two names",
    "",
    held=lambda: {
        "forward_": linear(),
        "run": linear(),
        "device": torch.randn(4),
        "w0": torch.randn(4),
        "stages": torch.nn.Parameter(torch.randn(4)),
    },
)
def awkward_names(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Names that a stage's own attributes have."""
    return self.run(self.forward_(x) + self.device) * self.w0 + self.stages


@row.of("A weight used in several stages", "ab", held=lambda: {"written": torch.ones(4), "kept": torch.ones(4)})
def equal_numbers_in_two_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Two buffers with equal numbers, of which one is written: they must not become one."""
    self.written.add_(1)
    return self.b(self.a(x) * self.written) * self.kept
