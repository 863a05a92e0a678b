"""Processes that begin with torch, its exporter and the loaders imported, which saves seconds each. They are processes like all others."""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

# A Python process has one fork server, so it imports what any of its users needs.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tools.preloaded"])


class ForkedProcess:
    """A process of the fork server, or another one of multiprocessing, with the methods of `subprocess.Popen` that are used of it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()

    @property
    def pid(self) -> int:
        """Its number at the operating system."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it did not end in `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signal_number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self._process.kill()


class ForkedCommand(ForkedProcess):
    """The command `stagepack`, with a pipe as its standard output. Variables that torch reads when it is imported have no effect.

    script: a file of Python code that runs in its place.
    errors: the file of its standard error; None for that of the fork server.
    constants: other values of constants in its modules, by their dotted names, such as how long it waits for a client.
    """

    def __init__(
        self,
        *arguments: str,
        script: Path | None = None,
        errors: Path | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        output, command_output = FORK_SERVER.Pipe(duplex=False)
        process = FORK_SERVER.Process(
            target=_run_in_pipe,
            args=(arguments, script, command_output, errors, constants or {}, dict(os.environ), os.getcwd()),
        )
        super().__init__(process)
        command_output.close()
        self.stdout = os.fdopen(os.dup(output.fileno()))
        output.close()


def run_forked(*arguments: str, script: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command `stagepack`, or a script, to its end, with both of its outputs captured."""
    with tempfile.NamedTemporaryFile() as file:
        command = ForkedCommand(*arguments, script=script, errors=Path(file.name))
        with command.stdout:
            printed = command.stdout.read()
        return subprocess.CompletedProcess(arguments, command.wait(), printed, Path(file.name).read_text())


def _run_in_pipe(
    arguments: Sequence[str],
    script: Path | None,
    output: Connection,
    errors: Path | None,
    constants: Mapping[str, float],
    environment: Mapping[str, str],
    folder: str,
) -> None:
    for constant_name, value in constants.items():
        module_name, _, attribute = constant_name.rpartition(".")
        setattr(importlib.import_module(module_name), attribute, value)
    os.dup2(output.fileno(), 1)
    output.close()
    if errors is not None:
        _write_errors(os.open(errors, os.O_WRONLY | os.O_APPEND))
    _run_command(arguments, environment, folder, script)


def command_with_log(
    arguments: Sequence[str],
    log_path: Path,
    environment: Mapping[str, str],
    folder: Path,
    *,
    script: Path | None = None,
) -> ForkedProcess:
    """Start the command `stagepack`, or a script, with both of its outputs in a file."""
    process = FORK_SERVER.Process(target=_run_in_log, args=(arguments, str(log_path), environment, str(folder), script))
    return ForkedProcess(process)


def _run_in_log(
    arguments: Sequence[str], log_path: str, environment: Mapping[str, str], folder: str, script: Path | None
) -> None:
    log_descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log_descriptor, 1)
    _write_errors(log_descriptor)
    _run_command(arguments, environment, folder, script)


def _write_errors(descriptor: int) -> None:
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)


def _run_command(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, script: Path | None = None
) -> None:
    # A process inherits signals that are ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.argv = ["stagepack", *arguments]
    try:
        if script is None:
            importlib.import_module("stagepack.cli").main(prog_name="stagepack")
        else:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
