"""What commands show on a terminal while bytes are moved. In a pipe they show nothing."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from tests.remote.http_server import HttpServer

# The command, which shows bytes from the first one on, and not after a second only. Each text is drawn at once: rich draws twice a second,
# and on a busy machine not before the next text.
COMMAND = """
import sys
from rich.status import Status
from stagepack import terminal
from stagepack.cli import main
update = Status.update
def drawn_update(self, *args, **named):
    update(self, *args, **named)
    self._live.refresh()
Status.update = drawn_update
terminal._FIRST_SECOND = terminal._SECONDS_BETWEEN_UPDATES = 0.0
main(sys.argv[1:])
"""
MODEL = """
import torch
def make():
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))), (torch.ones(1, 512),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "net.py").write_text(MODEL)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    stagepack.export(model, (torch.ones(1, 512),), out=folder / "m.stagepack", stages=2)
    return folder


def shown_on_a_terminal(folder: Path, *arguments: str, end_after: str = "") -> str:
    """Run a command on a terminal; return what it has printed there, without control sequences.

    Args:
        folder: the current folder of the command.
        arguments: the arguments of the command.
        end_after: interrupt the command when it has printed this.
    """
    terminal, end_of_command = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=end_of_command,
        stderr=end_of_command,
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(end_of_command)
    printed = b""
    try:
        while True:
            try:
                printed += os.read(terminal, 2**16)
            except OSError:  # all who had the terminal have ended
                break
            if end_after and end_after.encode() in printed:
                process.send_signal(signal.SIGINT)
                end_after = ""
        assert process.wait(timeout=60) == 0, printed.decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode())


def assert_bytes(printed: str, step: str) -> None:
    assert re.search(rf"{step}: \d+\.\d\d( of \d+\.\d\d)? GB, \d+ MB/s", printed), printed[-1000:]


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("verify m.stagepack", "verifying the bundle"),
        ("recut m.stagepack -o recut.stagepack --stages 3", "writing recut.stagepack"),
        pytest.param("export net.py:make -o out.stagepack", "writing out.stagepack", marks=pytest.mark.slow),
        pytest.param("load m.stagepack --copy", "loading stages", marks=pytest.mark.slow),
        pytest.param("load m.stagepack --stream", "loading stages", marks=pytest.mark.slow),
        pytest.param("load m.stagepack --stage 1 --copy", "loading stages", marks=pytest.mark.slow),
        pytest.param("load m.stagepack --stage 1 --stream", "loading stages", marks=pytest.mark.slow),
        pytest.param("load m.stagepack --processes 2 --copy", r"loading \S*m\.stagepack", marks=pytest.mark.slow),
    ],
)
def test_a_command_shows_the_bytes_that_it_moves(folder: Path, command: str, step: str) -> None:
    assert_bytes(shown_on_a_terminal(folder, *command.split()), step)


@pytest.mark.process
def test_pull(folder: Path, tmp_path: Path) -> None:
    with HttpServer(folder) as server:
        printed = shown_on_a_terminal(tmp_path, "pull", f"{server.url}/m.stagepack", "-o", "pulled.stagepack")
    assert_bytes(printed, rf"downloading {server.url}/m\.stagepack")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_serve(folder: Path, options: tuple[str, ...]) -> None:
    printed = shown_on_a_terminal(
        folder, "serve", "m.stagepack", "--http-port", "0", "--grpc-port", "0", *options, end_after="gRPC on"
    )
    assert_bytes(printed, r"loading \S*m\.stagepack")


@pytest.mark.parametrize(
    "function", [lambda path: stagepack.load(path, copy=True), lambda path: stagepack.load_stage(path, 0, copy=True)]
)
def test_the_library_shows_nothing_in_a_pipe(
    folder: Path, capfd: pytest.CaptureFixture[str], function: Callable[[Path], object]
) -> None:
    function(folder / "m.stagepack")
    assert capfd.readouterr() == ("", "")
