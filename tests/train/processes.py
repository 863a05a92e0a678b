"""Processes that train, with the environment that torchrun gives them."""

import atexit
import contextlib
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tools.fork_server import FORK_SERVER

_POLL_SECONDS = 0.005


class Worker:
    """A process that does a task of `tests.train.worker`. Both of its outputs go to one file."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="stagepack-worker-")
        os.close(descriptor)
        self._output_path = Path(path)
        self._process = FORK_SERVER.Process(target=_run, args=(arguments, environment, path))
        self._process.start()

    @property
    def output(self) -> str:
        return self._output_path.read_text()

    @property
    def exit_status(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signal_number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal_number)

    def wait_for_line(self, *beginnings: str, seconds: float = 120.0) -> str:
        """Return the first line that begins so, once it is there."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_ended = self.exit_status is not None
            for line in self.output.splitlines(keepends=True):
                if line.startswith(beginnings) and line.endswith("\n"):
                    return line
            if has_ended:
                break
            time.sleep(_POLL_SECONDS)
        raise AssertionError(f"no line begins with {beginnings}: {self.output}")

    def end(self) -> None:
        """Kill the process, and remove its output."""
        self._process.kill()
        self._process.join()
        self._output_path.unlink()


@contextlib.contextmanager
def started_workers(process_count: int, *arguments: object) -> Iterator[list[Worker]]:
    """Have some processes do a task, with arguments."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {"WORLD_SIZE": str(process_count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [Worker(list(map(str, arguments)), environment | {"RANK": str(rank)}) for rank in range(process_count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def run_workers(process_count: int, *arguments: object) -> None:
    """Have some processes do a task to its end. One that fails ends the others."""
    deadline = time.monotonic() + 300
    with started_workers(process_count, *arguments) as workers:
        while any(worker.exit_status is None for worker in workers) and time.monotonic() < deadline:
            if any(worker.exit_status for worker in workers):
                # The others may say who is lost.
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(_POLL_SECONDS)
        statuses = [worker.exit_status for worker in workers]
        assert statuses == [0] * process_count, "\n".join(worker.output for worker in workers)


def _run(arguments: list[str], environment: dict[str, str], output_path: str) -> None:
    """What a process does: as ``python -m tests.train.worker``, but for what is imported already."""
    output = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["worker", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        importlib.import_module("tests.train.worker").main()
    except Exception as error:  # noqa: BLE001 - as the interpreter does
        sys.last_value = error
        traceback.print_exc()
        status = 1
    # A process of the fork server ends without them.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
