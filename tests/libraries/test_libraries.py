"""Every model of a library, in 1, 3 and 5 stages, answers in a fresh process bit for bit as the captured program does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stagepack.errors import CaptureError
from tests.libraries.case import LibraryCase
from tests.libraries.cases import CASES, QUICK, REFUSED, REFUSED_CASES, STAGES
from tests.roundtrip.fresh_process import Runner, assert_right_in_fresh_process, started_runner
from tests.zoo.test_zoo import name_of


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with started_runner() as process:
        yield process


@pytest.mark.filterwarnings("default")  # libraries warn of their own code
@pytest.mark.parametrize(
    "case",
    [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: name_of(case),
)
def test_bit_exact(case: LibraryCase, tmp_path: Path, runner: Runner) -> None:
    capture = case.capture()
    assert_right_in_fresh_process(
        capture, operators=case.operators, stage_counts=STAGES, folder=tmp_path, runner=runner
    )
    assert_outputs_vary(tmp_path / f"{STAGES[0]}.out" / "0.safetensors")


def assert_outputs_vary(path: Path) -> None:
    """Answers that are all zeros, or not finite, would be equal whatever the stages compute."""
    outputs = {
        name: output for name, output in load_file(path).items() if output.is_floating_point() and output.numel() > 1
    }
    for name, output in outputs.items():
        assert output.isfinite().all(), f"{name} is not finite"
        assert output.unique().numel() > 1, f"{name} is {output.flatten()[0]} everywhere"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", REFUSED_CASES, ids=lambda case: name_of(case))
def test_what_is_not_captured_is_refused_with_the_reason(case: LibraryCase) -> None:
    with pytest.raises(CaptureError, match=REFUSED[case.name]):
        case.capture()
