"""How values travel from stage to stage, and out of the model."""

from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given

CASES: list[Case] = []
row = Rows(CASES, "values")


@row.of("skip connections over several stages", "abcd")
def skip_over_stages(self: Any, x: torch.Tensor) -> torch.Tensor:
    first = self.a(x)
    return self.d(self.c(self.b(first).relu()).relu()) + first + x


@row.of("skip connections over several stages", "abcde")
def dense_connections(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = [x]
    for layer in (self.a, self.b, self.c, self.d, self.e):
        found.append(layer(torch.stack(found).sum(0)).relu())
    return torch.cat(found, dim=1)


class UNet(torch.nn.Module):
    """Four levels down and up again; each level up joins what the same level down made."""

    def __init__(self, channels: tuple[int, ...] = (4, 8, 12, 16)) -> None:
        super().__init__()
        pairs = list(zip((3, *channels), channels, strict=False))
        self.down = torch.nn.ModuleList(self.block(before, after) for before, after in pairs)
        self.bottom = self.block(channels[-1], channels[-1])
        self.grow = torch.nn.ModuleList(
            torch.nn.ConvTranspose2d(after, after, 2, stride=2) for _, after in reversed(pairs)
        )
        self.up = torch.nn.ModuleList(
            self.block(2 * after, before) for before, after in reversed([(channels[0], channels[0]), *pairs[1:]])
        )
        self.head = torch.nn.Conv2d(channels[0], 2, 1)

    @staticmethod
    def block(before: int, after: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(before, after, 3, padding=1),
            torch.nn.GroupNorm(2, after),
            torch.nn.SiLU(),
            torch.nn.Conv2d(after, after, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = torch.nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


@row("a U-Net")
def u_net() -> Model:
    return UNet().eval(), given(torch.randn(2, 3, 32, 32))


@row.of("an input used only late", "abcd", lambda: (torch.randn(2, 4), torch.randn(4)))
def input_used_late(self: Any, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    return self.d(self.c(self.b(self.a(x)))) + late


@row.of("an output made early", "abcd")
def output_made_early(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    early = self.a(x)
    second = self.b(early)
    return self.d(self.c(second)), early, second.t()


@row.of("an output that is an input", "ab", lambda: (torch.randn(2, 4), torch.randn(3)))
def output_is_input(self: Any, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return other, self.b(self.a(x)), x, x.t(), other


@row("an output that is an input")
def identity() -> Model:
    return Lambda(lambda _, x: x), given()


@row.of("an output that is an input", "ab", held=lambda: {"table": torch.arange(4)})
def output_is_weight(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": self.b(self.a(x)), "weight": self.a.weight, "buffer": self.table}


@row.of("one tensor returned twice", "abc")
def returned_twice(self: Any, x: torch.Tensor) -> tuple[Any, ...]:
    y = self.b(self.a(x))
    z = self.c(y)
    return y, z, {"again": z, "first": [y, y]}, z


@row.of("constant, `None` and integer outputs", "abc", lambda: (torch.randn(2, 4), torch.randn(4), torch.randn(3)))
def constants_beside_values(self: Any, x: torch.Tensor, late: torch.Tensor, unused: torch.Tensor) -> tuple[Any, ...]:
    early = self.a(x)
    out = self.c(self.b(early)) + late
    return early, out, out, late, 7, None, "text", 2.5


@row.of("constant, `None` and integer outputs", "ab")
def odd_constants(self: Any, x: torch.Tensor) -> Any:
    y = self.b(self.a(x))
    return {"none": None, "yes": True, "size": x.shape[1], "inf": -float("inf"), "empty": [(), {}], "zero": -0.0}, y


@row.of(
    "unused inputs and weights",
    "abcd",
    lambda: (torch.randn(3), torch.randn(2, 4), torch.ones(1)),
    held=lambda: {"first": torch.randn(3), "last": torch.nn.Parameter(torch.randn(2, 2)), "flag": torch.tensor(True)},
)
def unused(self: Any, before: torch.Tensor, x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return self.c(self.a(x))


@row.of("unused inputs and weights", "abcd")
def unused_results(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    top, _, rest = self.a(x).split([1, 1, 2], dim=1)
    values, indices = self.b(x).max(dim=1)
    self.d(x)
    return torch.cat(torch.chunk(self.c(x), 2, dim=1)[::-1], dim=1), top, rest, values, indices


@row.of("an output made early", "abcd", lambda: (torch.randn(2, 4), torch.randn(3, 4)))
def two_towers(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    left, right = self.a(x), self.b(y)
    left, right = self.c(left).relu(), self.d(right).tanh()
    return left @ right.t(), left, right


@row("one tensor returned twice")
def memory_formats() -> Model:
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    channels_last = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return convolutions, given(channels_last)


@row.of("skip connections over several stages", "abcd")
def strided_values_cross(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned, wide = self.a(x).t(), self.b(x).sum().expand(4, 4)
    y = self.c(x)[:, ::2]
    return self.d(turned.t() + wide[:2]), turned, wide, y


@row.of("skip connections over several stages", "abc")
def lazy_conjugates_cross(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.complex(self.a(x), self.b(x)).conj()
    negative = y.imag
    return self.c(negative), y, negative, y * 2


@row.of("unused inputs and weights", "abc", held=lambda: {"start": torch.randn(2, 4)})
def nothing_of_the_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    """All inputs are unused: the result is made of weights."""
    return self.b(self.a(self.start)) @ self.c.weight


@row("unused inputs and weights")
def no_weights() -> Model:
    return Lambda(lambda _, x, y: ((x.sin() @ y).cos().softmax(-1), y.t())), given(torch.randn(2, 4), torch.randn(4, 3))
