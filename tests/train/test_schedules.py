"""Each schedule in 2 and 4 processes, with 1 to 8 microbatches: gradients are those of one process, or torch cannot do it."""

from pathlib import Path

import pytest

from stagepack.errors import OptionError
from stagepack_loaders.train.schedules import SCHEDULES, check_microbatches
from tests.train import mode_models, models
from tests.train.gradient_checks import check_gradients, check_modes
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

MICROBATCHES = range(1, 9)
PROCESSES = (2, 4)


def stage_count_of(schedule: str, process_count: int) -> int:
    return process_count if schedule in ("gpipe", "1f1b") else 2 * process_count


def is_possible(schedule: str, microbatches: int, process_count: int) -> bool:
    try:
        check_microbatches(schedule, microbatches, stage_count_of(schedule, process_count), process_count)
    except OptionError:
        return False
    return True


def runs_of(process_count: int) -> list[str]:
    return [
        f"{stage_count_of(schedule, process_count)}:{schedule}:{microbatches}"
        for schedule in SCHEDULES
        for microbatches in MICROBATCHES
        if is_possible(schedule, microbatches, process_count)
    ]


def test_numbers_of_microbatches_that_torch_cannot_do() -> None:
    refused = {
        (schedule, process_count): [m for m in MICROBATCHES if not is_possible(schedule, m, process_count)]
        for schedule in SCHEDULES
        for process_count in PROCESSES
    }
    assert {key: numbers for key, numbers in refused.items() if numbers} == {
        ("1f1b", 2): [1],
        ("1f1b", 4): [1, 2, 3],
        ("interleaved-1f1b", 2): [5, 7],
        ("interleaved-zero-bubble", 2): [5, 7],
    }
    with pytest.raises(OptionError, match=r"'1f1b' .*: expected 4 microbatches or more, found 3: choose 'gpipe'"):
        check_microbatches("1f1b", 3, 4, 4)
    with pytest.raises(OptionError, match=r"rounds of equal size, .*: expected a multiple of 2 microbatches, found 5"):
        check_microbatches("interleaved-1f1b", 5, 4, 2)
    with pytest.raises(OptionError, match="microbatches: expected an integer from 1 on, found 0"):
        check_microbatches("gpipe", 0, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("process_count", PROCESSES)
def test_tied_weights_skips_and_a_frozen_part(process_count: int, tmp_path: Path) -> None:
    for stage_count in (process_count, 2 * process_count):
        models.export_model(tmp_path / f"{stage_count}.stagepack", stage_count)
    run_workers("tests.train.worker", process_count, tmp_path, *runs_of(process_count))
    for run in runs_of(process_count):
        check_gradients(tmp_path, run, process_count)


@pytest.mark.slow
@pytest.mark.parametrize("process_count", PROCESSES)
def test_dropout_by_seed_and_batch_norms(process_count: int, tmp_path: Path) -> None:
    for stage_count in (process_count, 2 * process_count):
        mode_models.export_model(tmp_path / f"{stage_count}.stagepack", stage_count)
    run_workers("tests.train.mode_worker", process_count, tmp_path, *runs_of(process_count))
    for run in runs_of(process_count):
        check_modes(tmp_path, run, process_count)
