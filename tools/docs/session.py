"""Run the blocks of one page, in a working folder of their own.

Python blocks share one process, as they would share an interpreter. Each `stagepack` command is a process; by default a fork of one
that has imported torch, which saves 1.5 s a command.
"""

import contextlib
import io
import json
import linecache
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from tools.docs.page import ROOT, Block, read_commands
from tools.fork_server import FORK_SERVER, ForkedProcess, command_with_log

_SHELL_CHARACTERS = set("|&;<>$`*?(){}\n")  # what a shell does something with
_DEFAULT_PORTS = (8000, 8001)  # of `stagepack serve`
# Lines that torch and torchao log, which depend on the packages beside them.
_LOG_PATTERN = re.compile(r"^(?:[WIE]\d{4} \d\d:\d\d:.*|Failed to load .*torchao.*)\n", re.MULTILINE)
_TIME_LIMIT = 300  # seconds for one block
# Environment variables that change the output of commands: pytest prints more in CI, and in colors where it is told so.
_OUTPUT_VARIABLES = frozenset({"BUILD_NUMBER", "CI", "FORCE_COLOR", "PY_COLORS", "STAGEPACK_TRACEBACK"})


@dataclass(slots=True)
class _ServerJob:
    """A server that a page started with ``&``."""

    server_process: subprocess.Popen[bytes] | ForkedProcess
    log_path: Path
    shown_count: int = 0

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.server_process.poll() is not None

    def new_output(self) -> str:
        """What it printed since the last call."""
        log_text = self.log_path.read_text()
        shown_count, self.shown_count = self.shown_count, len(log_text)
        return log_text[shown_count:]


class Session:
    """The working folder of a page, its interpreter, and its servers.

    Attributes:
        folder: where the blocks run.
    """

    def __init__(self, folder: Path, *, is_fresh: bool = False) -> None:
        """Prepare a session; with `fresh`, every command is a new process, so that the times it prints are those of users."""
        self.folder = folder
        self._is_fresh = is_fresh
        self._port_by_default = dict(zip(_DEFAULT_PORTS, _free_ports(len(_DEFAULT_PORTS)), strict=True))
        self._page_interpreter: tuple[ForkServerProcess, Connection] | None = None
        self._server_job: _ServerJob | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("examples", "tools"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)

    def close(self) -> None:
        """End what still runs."""
        if self._page_interpreter is not None:
            self._page_interpreter[0].kill()
            self._page_interpreter[0].join()
        if self._server_job is not None:
            self._server_job.server_process.kill()

    def run(self, block: Block) -> list[str]:
        """Run a block; return what each of its commands printed, or what its code printed.

        Raises:
            RuntimeError: the code raised, or the patch does not apply.
            ValueError: the data does not parse.
        """
        match block.kind:
            case "python":
                return [self._run_python(block)]
            case "console":
                return [self._run_command(command.command_text) for command in read_commands(block.source)]
            case "file":
                file_path = self.folder / block.title
                file_path.parent.mkdir(parents=True, exist_ok=True)
                file_path.write_text(block.source)
            case "diff":
                self._apply(block.source)
            case "data":
                list(yaml.safe_load_all(block.source)) if block.language == "yaml" else json.loads(block.source)
        return []

    def _run_python(self, block: Block) -> str:
        if self._page_interpreter is None:
            parent_end, child_end = FORK_SERVER.Pipe()
            process = FORK_SERVER.Process(target=_interpret, args=(child_end, str(self.folder)), daemon=True)
            process.start()
            child_end.close()
            self._page_interpreter = process, parent_end
        connection = self._page_interpreter[1]
        connection.send((self._with_ports(block.source), block.line))
        if not connection.poll(_TIME_LIMIT):
            raise RuntimeError(f"the block of line {block.line} ran for more than {_TIME_LIMIT} s")
        printed_text, error_text = connection.recv()
        if error_text:
            raise RuntimeError(f"the block of line {block.line} raised:\n{error_text}")
        return self._as_shown(printed_text)

    def _run_command(self, command_text: str) -> str:
        if command_text == "kill %1":
            return self._stop_job()
        is_background = command_text.endswith(" &")
        command_text = self._with_ports(command_text.removesuffix(" &"))
        log_path = self.folder / f".output-{time.monotonic_ns()}"
        process = self._start(command_text, log_path)
        if is_background:
            self._server_job = _ServerJob(process, log_path)
            return self._as_shown(self._await_server(self._server_job))
        exit_status = process.wait(timeout=_TIME_LIMIT)
        printed_text = self._as_shown(log_path.read_text())
        log_path.unlink()
        return printed_text if exit_status == 0 else f"{printed_text}[exit status {exit_status}]\n"

    def _start(self, command_text: str, log_path: Path) -> "subprocess.Popen[bytes] | ForkedProcess":
        """Start a command with its output in a file."""
        command_words = shlex.split(command_text)
        if command_words[:2] == ["stagepack", "serve"] and "--http-port" not in command_words:
            command_words += [
                "--http-port",
                str(self._port_by_default[8000]),
                "--grpc-port",
                str(self._port_by_default[8001]),
            ]
            command_text = shlex.join(command_words)
        environment = page_environment(self.folder)
        log_path.touch()
        if (
            command_words[0] == "stagepack"
            and not self._is_fresh
            and not _SHELL_CHARACTERS & set(command_text.replace("'", ""))
        ):
            return command_with_log(command_words[1:], log_path, environment, self.folder)
        with log_path.open("wb") as log_file:
            return subprocess.Popen(
                ["/bin/bash", "-c", command_text],
                cwd=self.folder,
                env=environment,
                stdout=log_file,
                stderr=subprocess.STDOUT,
            )

    def _await_server(self, server_job: _ServerJob) -> str:
        """What a server prints until it listens.

        Raises:
            RuntimeError: it ended.
        """
        latest_time = time.monotonic() + _TIME_LIMIT
        while time.monotonic() < latest_time and "REST on" not in server_job.log_path.read_text():
            if server_job.has_ended():
                raise RuntimeError(f"the server ended: {server_job.log_path.read_text()}")
            time.sleep(0.02)
        return server_job.new_output()

    def _stop_job(self) -> str:
        assert self._server_job is not None
        self._server_job.server_process.send_signal(signal.SIGTERM)
        self._server_job.server_process.wait(timeout=_TIME_LIMIT)
        printed_text = self._as_shown(self._server_job.new_output())
        self._server_job = None
        return printed_text

    def _apply(self, patch_text: str) -> None:
        patch_command = ["patch", "--strip=1", "--no-backup-if-mismatch", "--silent"]
        patch_run = subprocess.run(
            patch_command, cwd=self.folder, input=patch_text, text=True, capture_output=True, check=False
        )
        if patch_run.returncode:
            raise RuntimeError(f"the patch does not apply: {patch_run.stdout}{patch_run.stderr}")

    def _with_ports(self, page_text: str) -> str:
        """A text of the page with the ports of this session."""
        for default_port, session_port in self._port_by_default.items():
            page_text = page_text.replace(f"127.0.0.1:{default_port}", f"127.0.0.1:{session_port}")
        return page_text

    def _as_shown(self, printed_text: str) -> str:
        """An output as pages show it: with the default ports, no path of this machine, and no logs of libraries."""
        for default_port, session_port in self._port_by_default.items():
            printed_text = printed_text.replace(f"127.0.0.1:{session_port}", f"127.0.0.1:{default_port}")
        printed_text = _LOG_PATTERN.sub("", printed_text)
        return printed_text.replace(f"{self.folder}/", "").replace(str(self.folder), ".").replace(f"{ROOT}/", "")


def page_environment(folder: Path) -> dict[str, str]:
    """The environment of a page's commands: the programs of this Python, the modules of this tree.

    Variables that change what pytest or stagepack print are left out.
    """
    inherited_variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _OUTPUT_VARIABLES and not name.startswith("PYTEST_")
    }
    source_root = folder if (folder / "stagepack").is_dir() else ROOT  # a page may work on a copy of the tree
    return inherited_variables | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{source_root}{os.pathsep}{source_root / 'loaders'}",
        "HF_HUB_OFFLINE": "1",
        "STAGEPACK_CACHE": str(folder / "cache"),
        "COLUMNS": "100",
    }


def copy_tree(folder: Path) -> None:
    """Copy the tree into a page's folder, for the pages that change it."""
    for file_name in ("stagepack", "loaders", "schema", "tools", "docs", "examples", "pyproject.toml", "README.md"):
        source_path = ROOT / file_name
        if source_path.is_dir():
            shutil.copytree(source_path, folder / file_name, ignore=shutil.ignore_patterns("__pycache__", "frozen"))
        else:
            shutil.copy(source_path, folder / file_name)
    shutil.copytree(
        ROOT / "tests",
        folder / "tests",
        ignore=shutil.ignore_patterns("__pycache__", "zoo", "libraries", "serve", "docs"),
    )
    (folder / "schema" / "frozen").symlink_to(ROOT / "schema" / "frozen")


def _interpret(connection: Connection, folder: str) -> None:
    """Run code that comes through a connection, in one namespace; send back what it printed, and its traceback."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries log there; what the code raises is sent back
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.suppress(EOFError):
        while True:
            block_source, line_number = connection.recv()
            block_name = f"<block of line {line_number}>"
            linecache.cache[block_name] = (len(block_source), None, block_source.splitlines(keepends=True), block_name)
            error_text = ""
            with contextlib.redirect_stdout(io.StringIO()) as captured_output:
                try:
                    exec(compile(block_source, block_name, "exec"), namespace)  # noqa: S102 - the project's own docs
                except BaseException:  # noqa: BLE001 - whatever it is, the reader of the test must see it
                    error_text = traceback.format_exc()
            connection.send((captured_output.getvalue(), error_text))


def _free_ports(count: int) -> list[int]:
    free_sockets = [socket.socket() for _ in range(count)]
    for free_socket in free_sockets:
        free_socket.bind(("127.0.0.1", 0))
    free_ports = [free_socket.getsockname()[1] for free_socket in free_sockets]
    for free_socket in free_sockets:
        free_socket.close()
    return free_ports
