"""How the processes of the tests run: several at once, on few cores; and the options of the tests."""

import atexit
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# A shell has the tests that it runs in the background ignore it, and the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# In one thread each, as more would wait for each other. Read when torch is imported; server processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# No test depends on what an earlier one has verified, or leaves a record in the home folder.
os.environ["STAGEPACK_VERIFIED_FILES"] = ""
# The processes of all tests share one record of checked graphs, which spares each of them a second. It has the digests of their content.
if "STAGEPACK_CHECKED_GRAPHS" not in os.environ:
    os.environ["STAGEPACK_CHECKED_GRAPHS"] = tempfile.mkdtemp(prefix="checked-graphs-")
    atexit.register(shutil.rmtree, os.environ["STAGEPACK_CHECKED_GRAPHS"], ignore_errors=True)

_PROCESS_EVENTS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options; pytest takes them from this file alone."""
    parser.addoption(
        "--gpu-device",
        default="cuda:0",
        metavar="DEVICE",
        help="the device of the tests marked gpu; cpu tries their bodies",
    )
    parser.addoption(
        "--one-process",
        action="store_true",
        help="leave out the tests marked process; any other test fails if it starts a process or listens at a port",
    )
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="append a JSON line for each test that has ended")


def pytest_configure(config: pytest.Config) -> None:
    """Write the outcomes in the process that collects those of all workers."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(path))


@pytest.hookimpl(tryfirst=True)  # before the plugin that distributes the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked process when only one may run, and let one worker run the tests of a file, which share fixtures."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))
    if config.getoption("--one-process"):
        left_out = [item for item in items if item.get_closest_marker("process")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("process")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the modules of the tests without the garbage collector: a fifth of the time, and what they import stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector pass over what was imported, which stays: a tenth of the time."""
    gc.freeze()
    gc.set_threshold(2_000, 20, 50)  # its passes over all other objects were 6 % of the time of tests/laws
    if session.config.getoption("--one-process"):  # after the modules of tests and plugins, which may start processes
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    # A socket in the file system, or without a name, is no port.
    if event in _PROCESS_EVENTS or (event == "socket.bind" and isinstance(args[1], tuple)):
        raise AssertionError(f"{event} {args}: mark the test with pytest.mark.process")


# Libraries set these variables when they are imported.
_LIBRARY_VARIABLES = ("CUDA_", "KMP_", "NCCL_", "PYTEST_", "TORCH", "TRITON_", "_TORCH")


@contextlib.contextmanager
def _forgetting_users_modules() -> Iterator[None]:
    """Forget what a command imports from folders of its user, which it searches until its process ends."""
    path = _users_path()
    yield
    if folders := {*_users_path()} - {*path}:
        sys.path[:] = [folder for folder in sys.path if folder not in folders]
        files = tuple(f"{folder}{os.sep}" for folder in folders)
        for module_name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(files):
                del sys.modules[module_name]


def _users_path() -> list[str]:
    """The path without the folders of packages, to which setuptools adds its own."""
    return [folder for folder in sys.path if not folder.startswith((sys.prefix, sys.base_prefix))]


@pytest.fixture(autouse=True)
def _forgets_users_modules() -> Iterator[None]:
    with _forgetting_users_modules():
        yield


@pytest.fixture(scope="module", autouse=True)
def _is_left_as_found() -> Iterator[None]:
    """Fail the last test of a module that changes what the modules after it read: in another order, they would pass."""
    before = _process_state()
    with _forgetting_users_modules():
        yield
    after = _process_state()
    before.setdefault("torch", after.get("torch"))  # the module may be the first to import it
    left = {name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)}
    assert not left, f"the module leaves behind (before, after): {left}"


def _process_state() -> dict[str, object]:
    state: dict[str, object] = {
        name: value for name, value in os.environ.items() if not name.startswith(_LIBRARY_VARIABLES)
    }
    for logger in (logging.root, logging.getLogger("stagepack"), logging.getLogger("py.warnings")):
        state[f"logger {logger.name}"] = logger.propagate, [*logger.handlers]
    state["signals"] = [*map(signal.getsignal, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))]
    state["paths"] = os.getcwd(), _users_path()
    state["collector"] = gc.isenabled(), gc.get_threshold()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["torch"] = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    return state


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
