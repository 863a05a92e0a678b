"""Memory that several values share, and that is written."""

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linears

CASES: list[Case] = []
row = Rows(CASES, "aliasing")
_ACROSS = "an in-place operator on a value whose views lie across the cut"
_INPUTS = "inputs mutated in place"


@row.of(_INPUTS, "ab", lambda: (torch.randn(2, 4), torch.zeros(4)))
def inputs_written(self: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    state.add_(1)
    return self.b(y) + state


@row.of(_INPUTS, "abcd", lambda: (torch.randn(2, 4), torch.zeros(4)))
def input_read_early_and_written_late(self: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x) + state)
    z = self.d(self.c(y))
    state.copy_(z.sum(0))
    return z


@row.of(_INPUTS, "abc", lambda: (torch.randn(2, 4), torch.zeros(4)))
def input_written_and_returned(self: Any, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    early = state[1:]
    y = self.b(self.a(x))
    state.add_(y.sum(0))
    return self.c(y), state, early, state.view(2, 2)


@row.of(_INPUTS, "abc", lambda: (torch.randn(2, 4), torch.zeros(2, 4)))
def input_written_by_a_slice(self: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    state[:, 1:3] = y[:, :2]
    z = self.b(y)
    state[0] *= 2
    return self.c(z) + state


@row.of(_INPUTS, "abc", lambda: (torch.randn(2, 4), [torch.zeros(4) for _ in range(3)]))
def several_inputs_written_in_several_layers(self: Any, x: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
    for layer, state in zip((self.a, self.b, self.c), states, strict=True):
        x = layer(x)
        state.add_(x.sum(0))
        x = x + state
    return x


@row.of(_ACROSS, "abc")
def activation_written_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    view = y[:, :2]
    z = self.b(y)
    view.mul_(2)
    return self.c(z) + y


@row.of(_ACROSS, "abcd")
def activation_written_after_it_crossed(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    z = self.c(self.b(y))
    y.add_(z)
    return self.d(z) * y


@row.of(_ACROSS, "abcd")
def views_of_views_written(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = self.a(x)
    turned = y.t()
    left, right = turned[:2], turned.narrow(0, 2, 2)
    z = self.b(x)
    left.add_(1)
    right[0].mul_(z.sum())
    return self.c(y) + self.d(turned.t()), right


def _aliased_unsaid(alias: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """A model that writes what an operator gave; it is a value it was given, or a view, which its schema may not say."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        same = alias(y)
        z = self.b(x)
        same.add_(z)
        return self.d(self.c(z)) + y

    return Lambda(run, **linears("abcd")).eval(), given()


@row(_ACROSS)
def dropout_that_does_nothing() -> Model:
    return _aliased_unsaid(lambda y: torch.nn.functional.dropout(y, 0.5, training=False))


@row(_ACROSS)
def einsum_that_is_a_view() -> Model:
    return _aliased_unsaid(lambda y: torch.einsum("ij->ji", y).t())


@row(_ACROSS)
def type_as_that_does_nothing() -> Model:
    return _aliased_unsaid(lambda y: y.type_as(torch.ones(1)))


@row(_ACROSS)
def atleast_that_does_nothing() -> Model:
    return _aliased_unsaid(torch.atleast_2d)


@row(_ACROSS)
def broadcast_that_is_a_view() -> Model:
    return _aliased_unsaid(lambda y: torch.broadcast_tensors(y, y.new_ones(4))[0].view(2, 4))


@row.of(_ACROSS, "abcd", frozen=True)
def meshgrid_that_is_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    wide, _ = torch.meshgrid(y[0], x[:, 0], indexing="ij")
    z = self.b(x)
    wide[:, 0].add_(z[0])
    return self.d(self.c(z)) + y


@row(_ACROSS)
def conversion_that_does_nothing() -> Model:
    return _aliased_unsaid(lambda y: y.to(torch.float32).contiguous().reshape(2, 4))


@row.of(_ACROSS, "abcd")
def mask_filled_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cheap to make and written after it was made: every layer needs what was written."""
    mask = torch.zeros(2, 4)
    mask[:, 1:] = 0.5
    mask.add_(torch.arange(4))
    for layer in (self.a, self.b, self.c, self.d):
        x = layer(x) + mask
    return x


@row.of(_ACROSS, "abcd")
def mask_written_between_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4)
    for layer in (self.a, self.b, self.c, self.d):
        x = layer(x) + mask
        mask.mul_(2)
    return x


@row.of(_ACROSS, "abcd")
def cheap_view_of_a_value_written_later(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    copied = y[:, :1] * 1
    z = self.b(y)
    y.zero_()
    return self.d(self.c(z) + copied) + y


@row.of(_ACROSS, "abcd")
def several_written_at_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    """One operator writes a list of values."""
    y, z = self.a(x), self.b(x)
    part = y[:, 2:]
    torch._foreach_mul_([y, z], 3.0)
    return self.c(z) + self.d(y) + part.sum()


@row.of(_ACROSS, "abcd", lambda: (torch.randn(3, 4),), frozen=True)
def shape_changed_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The value has another shape when it crosses than when it was made."""
    y = self.a(x)
    z = self.b(y)
    y.t_()
    return self.d(self.c(z)) @ y


@row.of(_ACROSS, "abc", frozen=True)
def written_as_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    room = torch.empty(2, 4)
    view = room.t()
    y = self.a(x)
    torch.add(y, x, out=room)
    return self.c(self.b(y)) + view.t()
