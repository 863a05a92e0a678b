"""Sizes that change from call to call, and sizes that the data decides."""

import math
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

CASES: list[Case] = []
row = Rows(CASES, "shapes")
_ARITHMETIC = "dynamic batch and sequence with arithmetic on sizes"
_DERIVED = "derived and bounded dimensions"
_DATA = "data-dependent sizes (`nonzero`, `item` with `torch._check`)"
_NO_SYMBOL = "No symbolic integer crosses an edge when a tensor that crosses has that size"
BATCH = Dim("batch", min=2, max=64)
SEQUENCE = Dim("sequence", min=2, max=128)


@row.of(
    _ARITHMETIC,
    "abcd",
    lambda: (torch.randn(2, 6, 4),),
    held=lambda: {"table": torch.randn(128, 4)},
    dynamic=({0: BATCH, 1: SEQUENCE},),
)
def attention_by_hand(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Heads, a causal mask, and positions, from the sizes of the input."""
    batch, length, width = x.shape
    places = torch.arange(length, device=x.device)
    mask = places[:, None] >= places[None, :]
    x = x + self.table[:length]
    for query, layer in ((self.a, self.b), (self.c, self.d)):
        heads = query(x).view(batch, length, 2, width // 2).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) / math.sqrt(width // 2)
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1) / length
        x = x + layer((scores @ heads).transpose(1, 2).reshape(batch, length, width))
    return x


@row.of(_ARITHMETIC, "abc", lambda: (torch.randn(2, 6, 4),), dynamic=({0: BATCH, 1: SEQUENCE},))
def square_root_of_a_size(self: Any, x: torch.Tensor) -> tuple[Any, ...]:
    length = x.shape[1]
    scale = 1 / torch.sym_sqrt(length)
    x = self.a(x) * scale
    x = self.b(x) * (length**-0.5) + length / 4
    return self.c(x) * scale, length * 2, length + x.shape[0] // 2


@row.of(_ARITHMETIC, "abc", lambda: (torch.randn(6, 4),), dynamic=({0: BATCH},))
def floats_and_booleans_of_sizes(self: Any, x: torch.Tensor) -> tuple[Any, ...]:
    length = x.shape[0]
    x = self.b(self.a(x)) * (length / 3)
    longest = torch.sym_max(length, 5)
    return self.c(x) + torch.sym_min(length, 4) + torch.sym_float(length), longest, length / 2, length % 3


@row.of(_ARITHMETIC, "abc", lambda: (torch.randn(2, 4), 5), dynamic=(None, Dim.DYNAMIC))
def an_integer_input(self: Any, x: torch.Tensor, count: int) -> tuple[Any, ...]:
    y = self.b(self.a(x)) * count
    return self.c(y) + torch.arange(count).sum(), count + 1


@row(_DERIVED)
def arithmetic_on_sizes() -> Model:
    def run(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = self.a(x)
        half = x.shape[1] // 2
        joined = torch.cat([x[:, :half], x[:, half:], y], dim=1)
        return self.b(joined) + torch.arange(joined.shape[1]).unsqueeze(-1), joined.shape[1] * 2

    half = Dim("half", min=2, max=16)
    shapes = ({0: None, 1: 2 * half}, {0: None, 1: 4 * half})
    return Lambda(run, **linears("ab")), given(torch.randn(2, 6, 4), torch.randn(2, 12, 4), dynamic=shapes)


@row(_DERIVED)
def neighbours() -> Model:
    """One input is one longer than the other, and the pairs of a third are its half."""

    def run(self: Any, x: torch.Tensor, longer: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        y = self.a(longer[1:]) - self.b(longer[:-1]) + x
        return self.d(self.c(y).view(pairs.shape[0], 2, 4).sum(1) + pairs)

    pair = Dim("pair", min=2, max=32)
    shapes = ({0: 2 * pair}, {0: 2 * pair + 1}, {0: pair})
    return Lambda(run, **linears("abcd")), given(
        torch.randn(6, 4), torch.randn(7, 4), torch.randn(3, 4), dynamic=shapes
    )


@row(_DERIVED)
def bounded_by_a_table() -> Model:
    def run(self: Any, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        return self.b(self.a(self.words(ids) + self.places[:length])) @ self.places[:length].t()

    words, places = torch.nn.Embedding(9, 4), torch.nn.Parameter(torch.randn(12, 4))
    ids = torch.randint(0, 9, (2, 5))
    return Lambda(run, **linears("ab"), words=words, places=places), given(
        ids, dynamic=({0: BATCH, 1: Dim("length", min=2, max=12)},)
    )


@row(_DERIVED)
def strided_convolutions() -> Model:
    """Sizes after a convolution are floors of quotients."""
    layers = [torch.nn.Conv1d(2, 4, 3, stride=2), torch.nn.GELU(), torch.nn.Conv1d(4, 4, 3, stride=2, padding=1)]
    layers += [torch.nn.AdaptiveAvgPool1d(3), torch.nn.Flatten(1), torch.nn.Linear(12, 4)]
    dims = {0: BATCH, 2: Dim("samples", min=16, max=256)}
    return torch.nn.Sequential(*layers), Inputs(args=(torch.randn(2, 2, 33),), dynamic_shapes=(dims,))


@row.of(_DATA, "abc", lambda: (torch.randn(4, 4), torch.tensor(3)))
def sizes_from_data(self: Any, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = count.item()
    torch._check(n >= 1)
    torch._check(n <= 4)
    picked = self.a(x).narrow(0, 0, n)
    return self.b(picked), self.c(x)[x.sum(1) > 0]


@row.of(_DATA, "abcd", lambda: (torch.randn(4, 4),))
def nonzero(self: Any, x: torch.Tensor) -> tuple[Any, ...]:
    where = torch.nonzero(self.a(x) > 0)
    count = where.shape[0]
    places = self.b(where[:, :1].float().expand(-1, 4))
    return self.c(places) + count, where, count, self.d(x)


@row.of(_DATA, "abcd", lambda: (torch.randn(6, 4), torch.tensor(3)), dynamic=({0: Dim("many", min=4, max=64)}, None))
def items_used_in_several_layers(self: Any, x: torch.Tensor, length: torch.Tensor) -> tuple[Any, ...]:
    """A number read from data makes sizes, scales and slices far from where it was read."""
    n: Any = length.item()
    scale = x.sum().item()
    torch._check(n >= 2)
    torch._check(n < x.shape[0])
    y = self.b(self.a(x)[:n]) * scale
    z = self.c(x)[n:]
    return self.d(torch.cat([z, y])) + torch.zeros(n).sum(), n * 2, scale


@row.of(_DATA, "abcd", lambda: (torch.randn(3, 4), torch.tensor([2, 1, 2])))
def repeated_by_data(self: Any, x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    many = torch.repeat_interleave(self.a(x), counts, dim=0)
    unique, inverse = torch.unique(counts, return_inverse=True)
    return self.c(self.b(many)), unique, self.d(x)[inverse]


@row.of(_NO_SYMBOL, "abcd", lambda: (torch.randn(2, 3, 4),), dynamic=({0: BATCH, 1: SEQUENCE},))
def sizes_used_far_away(self: Any, x: torch.Tensor) -> torch.Tensor:
    batch, length = x.shape[0], x.shape[1]
    for layer in (self.a, self.b, self.c, self.d):
        x = layer(x).view(batch, length, 2, 2).transpose(2, 3).reshape(batch, length, 4) + length
    return x.new_ones(length, batch) @ x.sum(1)


@row.of(_NO_SYMBOL, "abcd", lambda: (torch.randn(2, 4), torch.randn(5, 4)), dynamic=(None, {0: BATCH}))
def size_of_what_does_not_cross(self: Any, x: torch.Tensor, context: torch.Tensor) -> tuple[Any, ...]:
    """The size of an input that only the first layer takes."""
    y = self.a(x) + self.b(context).sum(0)
    z = self.c(y) / context.shape[0]
    return self.d(z).unsqueeze(0).expand(context.shape[0], -1, -1), context.shape[0]


@row.of(_NO_SYMBOL, "abcd", lambda: (torch.randn(2, 5, 4), torch.tensor([5, 3])), dynamic=({1: SEQUENCE}, None))
def mask_of_a_written_input(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A cheap mask made of an input before the input is written."""
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    x = self.a(x) * mask.unsqueeze(-1)
    lengths.sub_(1)
    for layer in (self.b, self.c, self.d):
        x = layer(x) * mask.unsqueeze(-1)
    return x


@row.of(
    _NO_SYMBOL,
    "",
    lambda: (torch.randn(5, 4),),
    held=lambda: {"a": linear(), "b": linear(), "c": linear()},
    dynamic=({0: BATCH},),
)
def table_made_in_autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A cheap table whose type is that of the region that it is made in."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        angles = torch.arange(x.shape[0]).float()[:, None] @ torch.ones(1, 4)
    for layer in (self.a, self.b, self.c):
        x = layer(x) + angles.cos()
    return x


@row.of(
    _NO_SYMBOL,
    "abcd",
    lambda: (torch.randn(2, 5, 4),),
    held=lambda: {"speeds": torch.tensor([1.0, 0.1, 0.01, 0.001])},
    dynamic=({0: BATCH, 1: SEQUENCE},),
)
def rotary_tables(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Tables that every layer uses, made of a buffer and the positions."""
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.speeds
    cos, sin = angles.cos(), angles.sin()
    for layer in (self.a, self.b, self.c, self.d):
        y = layer(x)
        x = x + y * cos + y.roll(1, -1) * sin
    return x


@row.of(
    _NO_SYMBOL,
    "abcd",
    lambda: (torch.randn(2, 5, 4),),
    held=lambda: {"speeds": torch.tensor([1.0, 0.1, 0.01, 0.001])},
    dynamic=({0: BATCH, 1: SEQUENCE},),
)
def rotary_tables_of_a_written_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.speeds.mul_(0.5)
    cos = (torch.arange(x.shape[1], device=x.device)[:, None] * self.speeds).cos()
    for layer in (self.a, self.b, self.c, self.d):
        x = x + layer(x) * cos
    return x


@row.of(_NO_SYMBOL, "abc", lambda: (torch.randn(4, 4), torch.tensor(3)))
def mask_of_a_size_from_data(self: Any, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A mask that every layer uses and the model returns; its size is read from an input."""
    n = count.item()
    torch._check(n >= 2)
    torch._check(n <= 4)
    mask = torch.arange(n) % 2
    x = x[:n]
    for layer in (self.a, self.b, self.c):
        x = layer(x) * mask[:, None]
    return x, mask
