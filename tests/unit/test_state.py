"""Which weights of a model are state: those that a call writes and a later call can see."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from tests.bundle_editor import BundleEditor


class Calls(torch.nn.Module):
    """A model with buffers, a constant that is an attribute, and the forward of a case."""

    kept: torch.Tensor
    halves: torch.Tensor
    hidden: torch.Tensor

    def __init__(self, case: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.case = case
        self.linear = torch.nn.Linear(3, 3)
        self.plain = torch.tensor([1.0, 2.0, 3.0])
        self.register_buffer("kept", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("halves", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16))
        self.register_buffer("hidden", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.case(self, self.linear(x))


def new_constant(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return (x - torch.tensor([0.5, 0.25, 0.125])) / x.new_tensor([2.0, 3.0, 4.0])


def written_new_constant(m: Calls, x: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([1.0, 2.0, 3.0])
    total += x.sum(0)
    total.mul_(2).detach_()
    return total + x


def written_view_of_new_constant(m: Calls, x: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([1.0, 2.0, 3.0])
    total[1:] = x[0, 1:]
    return total * x


def written_clone(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.plain.clone().add_(x[0]) + m.kept.clone().mul_(x[0]) + m.hidden.detach().clone().sub_(x[0])


def detached(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return x * m.kept.detach() + m.plain.detach()


def detached_in_place(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return x.detach_() + m.kept.detach_()


def written_conversion(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.halves.float().mul_(x[0]) + m.kept.to(torch.float64).add_(x[0]).float() + x


def written_copy(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(m.kept).copy_(x[0]) + m.kept.new_ones(3).add_(x[1])


def filled_result(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return (x + m.kept).fill_(2) + torch.arange(3).add_(1) * x


def counted(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.kept.add_(1)
    return x * m.kept


def counted_by_view(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.hidden[1:].mul_(2)
    return x * m.hidden


def counted_after_detach(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.kept.detach().add_(1)
    return x * m.kept


def counted_by_conversion(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.kept.to(torch.float32).add_(1)
    return x * m.kept


def counted_constant(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.plain.add_(1)
    return x * m.plain


def overwritten(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.kept.copy_(x[0])
    return m.kept + x


STATES: dict[Callable[..., torch.Tensor], tuple[str, ...]] = {
    new_constant: (),
    written_new_constant: (),
    written_view_of_new_constant: (),
    written_clone: (),
    detached: (),
    detached_in_place: (),
    written_conversion: (),
    written_copy: (),
    filled_result: (),
    counted: ("kept",),
    counted_by_view: ("hidden",),
    counted_after_detach: ("kept",),
    counted_by_conversion: ("kept",),
    counted_constant: ("plain",),
    # Each call writes it before it reads it, but state_dict and results that are views of it show what the last call wrote.
    overwritten: ("kept",),
}
X = torch.arange(6.0).reshape(2, 3)


def exported(case: Callable[..., torch.Tensor], folder: Path) -> stagepack.Bundle:
    torch.manual_seed(0)
    return stagepack.export(Calls(case).eval().requires_grad_(False), (X,), out=folder / "b.stagepack")


def answers(case: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Calls(case).eval().requires_grad_(False)
    return [model(X).clone() for _ in range(3)]


@pytest.mark.parametrize("case", STATES)
def test_what_a_later_call_sees_is_state_and_nothing_else(case: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    bundle = exported(case, tmp_path)
    assert [stage.state for stage in bundle.stages] == [STATES[case]]
    pipe = stagepack.load(bundle)
    for _ in range(2):
        for expected in answers(case):
            assert torch.equal(pipe(X), expected)
        pipe.reset_state()


def test_bundle_of_before_that_lists_a_constant_as_state_answers(tmp_path: Path) -> None:
    """Exports of before 31ac02c listed each constant that `aten.detach_` was called on."""
    model, x = Calls(new_constant), torch.rand(2, 3)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack")
    assert not bundle.stages[0].state
    constant_names = [weight.names[0] for weight in bundle.graph(0).weights if weight.kind == "constant"]
    editor = BundleEditor.copy(bundle.path, tmp_path / "old.stagepack")
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][0].update(state=constant_names))
    old = stagepack.open(editor.path)
    old.verify()
    pipe = stagepack.load(old)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x), model(x))
    again = stagepack.recut(editor.path, out=tmp_path / "again.stagepack", stages=2)
    assert torch.equal(stagepack.load(again)(x), pipe(x))
