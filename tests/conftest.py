"""How the processes of the tests run: several at once, on few cores; and the options of the tests on GPUs."""

import atexit
import gc
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# In one thread each, as more would wait for each other. Read when torch is imported; server processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# No test depends on what an earlier one has verified, or leaves a record in the home folder.
os.environ["STAGEPACK_VERIFIED_FILES"] = ""
# The processes of all tests share one record of checked graphs, which spares each of them a second. It has the digests of their content.
if "STAGEPACK_CHECKED_GRAPHS" not in os.environ:
    os.environ["STAGEPACK_CHECKED_GRAPHS"] = tempfile.mkdtemp(prefix="checked-graphs-")
    atexit.register(shutil.rmtree, os.environ["STAGEPACK_CHECKED_GRAPHS"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options; pytest takes them from this file alone."""
    parser.addoption(
        "--gpu-device",
        default="cuda:0",
        metavar="DEVICE",
        help="the device of the tests marked gpu; cpu tries their bodies",
    )
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="append a JSON line for each test that has ended")


def pytest_configure(config: pytest.Config) -> None:
    """Write the outcomes in the process that collects those of all workers."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(path))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported, which stays: a tenth of the time."""
    gc.freeze()


class _Outcomes:
    """Appends a line for each test, so that a run that is cut off has those of the tests that have ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext[-4000:]
        outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
        outcome |= dict(report.user_properties)
        with self._path.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
