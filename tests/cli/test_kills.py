"""Killed writers: the output is nothing or a whole bundle, and nothing is left behind that the next writer does not remove."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.format.output_file import TemporaryFolder, siblings
from stagepack.roads.recut import recut

EXPORT = """
import sys, torch, stagepack
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))
print("ready", flush=True)
stagepack.export(model, (torch.ones(1, 1024),), out=sys.argv[1], stages=4, overwrite=True)
"""


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills") / "m.stagepack"
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
    stagepack.export(model, (torch.ones(1, 2048),), out=path, stages=2)
    return path


def start_recut(bundle_path: Path, out: Path) -> subprocess.Popen[str]:
    options = ["--stages", "4", "-o", str(out), "--overwrite"]
    command = [sys.executable, "-m", "stagepack", "recut", str(bundle_path), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)


def leftovers(out: Path) -> list[Path]:
    return [*siblings(out, "part"), *siblings(out, "old")]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.process
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_a_killed_recut_leaves_is_removed(
    signal_number: signal.Signals, bundle_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.stagepack"
    process = start_recut(bundle_path, out)
    wait_for(lambda: leftovers(out), process)
    process.send_signal(signal_number)
    exit_status = process.wait()
    if not out.exists():
        assert exit_status == (-signal_number if signal_number != signal.SIGINT else 130)
    if signal_number != signal.SIGKILL:
        assert not leftovers(out)
    recut(bundle_path, out=out, stages=4, overwrite=True).verify()
    assert os.listdir(tmp_path) == ["out.stagepack"]


# The signal comes when the folder exists, and before the `with` statement is entered.
EARLY_SIGNAL = """
import os, pathlib, signal, sys
from stagepack.cli.termination import orderly_termination
from stagepack.format import output_file

def lock(folder):
    os.kill(os.getpid(), signal.SIGTERM)
    return []

output_file._lock = lock
with orderly_termination(), output_file.TemporaryFolder(pathlib.Path(sys.argv[1])):
    pass
"""


@pytest.mark.process
def test_a_signal_before_the_folder_is_used(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", EARLY_SIGNAL, str(tmp_path / "m.stagepack")])
    assert run.returncode == -signal.SIGTERM
    assert os.listdir(tmp_path) == []


def test_the_folder_of_a_living_process_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "m.stagepack"
    abandoned = tmp_path / ".m.stagepack.01234567.part"
    other_output = tmp_path / ".n.stagepack.01234567.part"
    for folder in (abandoned, other_output):
        folder.mkdir()
    with TemporaryFolder(out) as first, TemporaryFolder(out) as second:
        assert not abandoned.exists()
        assert first.path.exists()
        assert second.path.exists()
    assert os.listdir(tmp_path) == [other_output.name]


def test_a_replaced_bundle_is_kept_until_there_is_another_one(bundle_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.stagepack"
    replaced = tmp_path / ".out.stagepack.01234567.old"
    shutil.copytree(bundle_path, replaced)
    with TemporaryFolder(out):
        assert replaced.exists()
    recut(bundle_path, out=out, stages=2)
    assert not replaced.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "kills"), [("recut", 30), ("export", 20)])
def test_random_kills(command: str, kills: int, bundle_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.stagepack"
    randomness = random.Random(0)  # noqa: S311 - moments of kills

    def start() -> subprocess.Popen[str]:
        if command == "recut":
            return start_recut(bundle_path, out)
        process = subprocess.Popen([sys.executable, "-c", EXPORT, str(out)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    process, start_time = start(), time.monotonic()
    process.communicate()
    assert process.returncode == 0
    duration = time.monotonic() - start_time
    digest = stagepack.open(out).digest
    for _ in range(kills):
        process = start()
        time.sleep(randomness.uniform(0, duration))
        process.send_signal(randomness.choice([signal.SIGKILL, signal.SIGTERM]))
        process.communicate()
        if out.exists():
            opened = stagepack.open(out)
            assert opened.digest == digest
            opened.verify()
    process = start()
    process.communicate()
    assert process.returncode == 0
    assert stagepack.open(out).digest == digest
    assert os.listdir(tmp_path) == ["out.stagepack"]


@pytest.mark.slow
def test_kills_of_every_writer() -> None:
    command = [sys.executable, "-m", "tools.kill_writers", "--kills", "10"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
