"""Every model of a library, in 1, 3 and 5 stages, answers in a fresh process bit for bit as the captured program does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libraries.case import LibraryCase
from tests.libraries.cases import CASES, QUICK
from tests.roundtrip.fresh_process import Runner, assert_right_in_fresh_process, started_runner
from tests.zoo.test_zoo import name_of

STAGES = (1, 3, 5)


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
    assert_right_in_fresh_process(
        case.capture(), operators=case.operators, stage_counts=STAGES, folder=tmp_path, runner=runner
    )
