"""Processes that begin with torch and the loaders imported, which saves seconds a process. They are processes like all others."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

# All tests of a pytest process share one fork server, so it imports what any of them needs.
_PRELOADED_MODULES = [
    "stagepack.cli.serve_command",
    "stagepack_loaders.distributed.process_program",
    "stagepack_loaders.torch.runtime",
    "stagepack_loaders.torch.prepare",
    "stagepack_loaders.train.start",
    "stagepack_serving.server.server",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(_PRELOADED_MODULES)


class ForkedProcess:
    """A process of the fork server, with the methods of `subprocess.Popen` that are used of it."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signal_number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def kill(self) -> None:
        self._process.kill()


class ForkedCommand(ForkedProcess):
    """The command `stagepack`, with a pipe as its standard output. Variables that torch reads when it is imported have no effect."""

    def __init__(self, *arguments: str) -> None:
        output, command_output = FORK_SERVER.Pipe(duplex=False)
        process = FORK_SERVER.Process(
            target=_run_command, args=(arguments, command_output, dict(os.environ), os.getcwd())
        )
        super().__init__(process)
        command_output.close()
        self.stdout = os.fdopen(os.dup(output.fileno()))
        output.close()


def _run_command(arguments: Sequence[str], output: Connection, environment: Mapping[str, str], folder: str) -> None:
    # A process inherits signals that are ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(output.fileno(), 1)
    output.close()
    sys.stdout = os.fdopen(1, "w")
    sys.argv = ["stagepack", *arguments]
    importlib.import_module("stagepack.cli").main()
