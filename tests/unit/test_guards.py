"""Conditions on sizes that a model was captured for: kept in the bundle, and asked of each call."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.export import Dim

import stagepack
from stagepack.cli import main
from stagepack.errors import InputError
from stagepack.format.shapes import format_guard

AUTO = {0: Dim.AUTO}


class Branches(torch.nn.Module):
    """Computes otherwise for long inputs, and for an odd number of rows, than it does for its example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(rows) if rows.shape[0] % 2 == 0 else rows
        return hidden.sum() - others.sum() if rows.shape[0] + others.shape[0] <= 10 else hidden.sum()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("guards") / "model.stagepack"
    args = torch.ones(4, 4), torch.ones(3)
    return stagepack.export(Branches(), args, dynamic_shapes=(AUTO, AUTO), out=out, stages=2)


def test_a_bundle_has_the_conditions_of_the_capture(bundle: stagepack.Bundle) -> None:
    conditions = [format_guard(guard) for guard in bundle.entry_point.guards]
    assert any("%" in condition and condition.endswith("== 0") for condition in conditions)
    assert any(condition.endswith("<= 10") for condition in conditions)


def test_a_call_that_fits_is_answered(bundle: stagepack.Bundle) -> None:
    torch.manual_seed(0)
    model = Branches()
    pipeline = stagepack.load(bundle)
    for rows, others in [(4, 3), (2, 6), (6, 4)]:
        args = torch.randn(rows, 4), torch.randn(others)
        assert torch.equal(pipeline(*args), model(*args))


@pytest.mark.parametrize(("rows", "others", "condition"), [(3, 3, "% 2 == 0"), (8, 7, "<= 10")])
def test_a_call_that_the_model_answers_otherwise_is_refused(
    bundle: stagepack.Bundle, rows: int, others: int, condition: str
) -> None:
    with pytest.raises(InputError, match=f"expected .*{condition}, for which the model was captured, found"):
        stagepack.load(bundle)(torch.ones(rows, 4), torch.ones(others))


def test_the_conditions_stay_in_other_cuts_and_in_exported_programs(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    assert bundle.entry_point.guards
    recut = stagepack.recut(bundle, out=tmp_path / "recut.stagepack", stages=1)
    assert recut.entry_point.guards == bundle.entry_point.guards

    program = torch.export.export(Branches(), (torch.ones(4, 4), torch.ones(3)), dynamic_shapes=(AUTO, AUTO))
    torch.export.save(program, tmp_path / "program.pt2")
    for source in (program, tmp_path / "program.pt2"):
        exported = stagepack.export(source, out=tmp_path / "exported.stagepack", stages=1, overwrite=True)
        assert exported.entry_point.guards == bundle.entry_point.guards


def test_inspect_tells_the_conditions(bundle: stagepack.Bundle) -> None:
    assert "only for sizes with" in CliRunner().invoke(main, ["inspect", str(bundle.path)]).output
