"""`stagepack doctor` gives its rows as they come, stops a way that has no end, and keeps its rows after Ctrl-C."""

import json
import signal
import time
from pathlib import Path

import pytest

from stagepack.capture.time_limit import TimeLimitReached, time_limit
from tests.hostile.attack import run
from tests.waiting import wait_until
from tools.fork_server import ForkedCommand

MODELS = """
import pathlib
import time

import torch


class Endless(torch.nn.Module):
    def forward(self, x):
        if torch.compiler.is_exporting():
            pathlib.Path(__file__).with_suffix(".traced").touch()
        while torch.compiler.is_exporting():
            try:
                time.sleep(0.01)
            except Exception:
                pass
        return x + 1


class Stubborn(torch.nn.Module):
    def forward(self, x):
        end = time.monotonic() + 60
        while torch.compiler.is_exporting() and time.monotonic() < end:
            try:
                time.sleep(0.01)
                caught = 0
            except:
                caught = 1
                end -= 40
        return x + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 2), Endless()

    def forward(self, x):
        return self.last(self.first(x))


def net():
    return Net(), (torch.ones(1, 2),)


def stubborn():
    return Stubborn(), (torch.ones(1, 2),)
"""
STOPPED = "has no end after 1 s, and is stopped: give it more by --time-limit"

# draft_export of torch leaves its log open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def test_a_way_without_an_end_is_stopped(models: Path) -> None:
    start_time = time.monotonic()
    done = run("doctor", f"{models}:net", "--time-limit", "1", "--json")
    assert time.monotonic() - start_time < 60
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    errors = {attempt["way"]: attempt["error"] for attempt in facts["attempts"]}
    assert errors["the model runs"] is None
    assert errors["torch.export.export"] == STOPPED
    assert "torch.export.draft_export" in errors
    assert all(attempt["seconds"] < 20 for attempt in facts["attempts"])
    assert facts["modules"][-1]["error"].startswith("the search has no end after 1 s, and is stopped here")


def test_code_that_catches_everything_is_stopped_again(models: Path) -> None:
    done = run("doctor", f"{models}:stubborn", "--time-limit", "1", "--json")
    assert json.loads(done.stdout)["attempts"][0]["error"] is None
    assert all(attempt["seconds"] < 20 for attempt in json.loads(done.stdout)["attempts"])


def test_a_limit_leaves_the_alarm_of_its_caller() -> None:
    rung: list[int] = []
    known = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeLimitReached), time_limit(0.05):
            time.sleep(5)
        time.sleep(0.4)
    finally:
        signal.signal(signal.SIGALRM, known)
    assert rung == [1]
    with pytest.raises(TimeLimitReached), time_limit(0):
        pytest.fail("the time is over before the block begins")


@pytest.mark.process
@pytest.mark.parametrize("options", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
def test_rows_come_one_by_one_and_stay_after_an_interrupt(models: Path, options: list[str]) -> None:
    process = ForkedCommand("doctor", f"{models}:net", "--time-limit", "60" if options else "2", *options)
    with process.stdout:
        if options:
            wait_until(models.with_suffix(".traced").exists, seconds=120)
            rows = []
        else:
            rows = [process.stdout.readline() for _ in range(4)]
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.wait(60) == 130
    if options:
        facts = json.loads(output)
        assert facts["interrupted"] is True
        assert facts["attempts"][0]["way"] == "the model runs"
    else:
        assert [row.split("  ")[1].strip() for row in rows[1:]] == ["way", "the model runs", "torch.export.export"]
        assert "has no end after 2 s" in rows[3]
