"""Run the blocks of one page, in a working folder of their own.

Python blocks share one process, as they would share an interpreter. Each `stagepack` command is a process; by default a fork of one
that has imported torch, which saves 1.5 s a command.
"""

import contextlib
import io
import json
import linecache
import multiprocessing
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from tools.docs.page import ROOT, Block, read_commands

_FORKS = multiprocessing.get_context("forkserver")
_PRELOADED = ["stagepack.exporter", "stagepack_loaders.load", "stagepack_loaders.torch.stage", "torch._dynamo"]
_SHELL = set("|&;<>$`*?(){}\n")  # what a shell does something with
_PORTS = (8000, 8001)  # of `stagepack serve`
# Lines that torch and torchao log, which depend on the packages beside them.
_LOGGED = re.compile(r"^(?:[WIE]\d{4} \d\d:\d\d:.*|Failed to load .*torchao.*)\n", re.MULTILINE)
_PATIENCE = 120  # seconds for one block


@dataclass(slots=True)
class _Job:
    """A server that a page started with ``&``."""

    process: subprocess.Popen[bytes] | ForkServerProcess
    log: Path
    shown: int = 0

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is not None
        return self.process.exitcode is not None

    def new_output(self) -> str:
        """What it printed since the last call."""
        text = self.log.read_text()
        shown, self.shown = self.shown, len(text)
        return text[shown:]


class Session:
    """The working folder of a page, its interpreter, and its servers.

    Attributes:
        folder: where the blocks run.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """Prepare a session; with `fresh`, every command is a new process, so that the times it prints are those of users."""
        self.folder = folder
        self._fresh = fresh
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._interpreter: tuple[ForkServerProcess, Connection] | None = None
        self._job: _Job | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        _FORKS.set_forkserver_preload(_PRELOADED)

    def close(self) -> None:
        """End what still runs."""
        if self._interpreter is not None:
            self._interpreter[0].kill()
            self._interpreter[0].join()
        if self._job is not None and not self._job.has_ended():
            os.kill(self._job.process.pid or 0, signal.SIGKILL)

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
                return [self._run_command(command.text) for command in read_commands(block.source)]
            case "file":
                path = self.folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.source)
            case "diff":
                self._apply(block.source)
            case "data":
                list(yaml.safe_load_all(block.source)) if block.language == "yaml" else json.loads(block.source)
        return []

    def _run_python(self, block: Block) -> str:
        if self._interpreter is None:
            here, there = _FORKS.Pipe()
            process = _FORKS.Process(target=_interpret, args=(there, str(self.folder)), daemon=True)
            process.start()
            there.close()
            self._interpreter = process, here
        connection = self._interpreter[1]
        connection.send((self._with_ports(block.source), block.line))
        if not connection.poll(_PATIENCE):
            raise RuntimeError(f"the block of line {block.line} ran for more than {_PATIENCE} s")
        output, problem = connection.recv()
        if problem:
            raise RuntimeError(f"the block of line {block.line} raised:\n{problem}")
        return self._as_shown(output)

    def _run_command(self, text: str) -> str:
        if text == "kill %1":
            return self._stop_job()
        background = text.endswith(" &")
        text = self._with_ports(text.removesuffix(" &"))
        log = self.folder / f".output-{time.monotonic_ns()}"
        process = self._start(text, log)
        if background:
            self._job = _Job(process, log)
            return self._as_shown(self._await_server(self._job))
        status = _wait(process)
        output = self._as_shown(log.read_text())
        log.unlink()
        return output if status == 0 else f"{output}[exit status {status}]\n"

    def _start(self, text: str, log: Path) -> "subprocess.Popen[bytes] | ForkServerProcess":
        """Start a command with its output in a file."""
        words = shlex.split(text)
        if words[:2] == ["stagepack", "serve"] and "--http-port" not in words:
            words += ["--http-port", str(self._ports[8000]), "--grpc-port", str(self._ports[8001])]
            text = shlex.join(words)
        environment = page_environment(self.folder)
        log.touch()
        if words[0] == "stagepack" and not self._fresh and not _SHELL & set(text.replace("'", "")):
            process = _FORKS.Process(target=_run_stagepack, args=(words, str(self.folder), str(log), environment))
            process.start()
            return process
        with log.open("wb") as output:
            return subprocess.Popen(
                ["/bin/bash", "-c", text], cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _await_server(self, job: _Job) -> str:
        """What a server prints until it listens.

        Raises:
            RuntimeError: it ended.
        """
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and "REST on" not in job.log.read_text():
            if job.has_ended():
                raise RuntimeError(f"the server ended: {job.log.read_text()}")
            time.sleep(0.02)
        return job.new_output()

    def _stop_job(self) -> str:
        assert self._job is not None
        os.kill(self._job.process.pid or 0, signal.SIGTERM)
        _wait(self._job.process)
        output = self._as_shown(self._job.new_output())
        self._job = None
        return output

    def _apply(self, patch: str) -> None:
        command = ["patch", "--strip=1", "--no-backup-if-mismatch", "--silent"]
        done = subprocess.run(command, cwd=self.folder, input=patch, text=True, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the patch does not apply: {done.stdout}{done.stderr}")

    def _with_ports(self, text: str) -> str:
        """A text of the page with the ports of this session."""
        for stated, actual in self._ports.items():
            text = text.replace(f"127.0.0.1:{stated}", f"127.0.0.1:{actual}")
        return text

    def _as_shown(self, output: str) -> str:
        """An output as pages show it: with the default ports, no path of this machine, and no logs of libraries."""
        for stated, actual in self._ports.items():
            output = output.replace(f"127.0.0.1:{actual}", f"127.0.0.1:{stated}")
        output = _LOGGED.sub("", output)
        return output.replace(f"{self.folder}/", "").replace(str(self.folder), ".").replace(f"{ROOT}/", "")


def page_environment(folder: Path) -> dict[str, str]:
    """The environment of a page's commands: the programs of this Python, the modules of this tree."""
    tree = folder if (folder / "stagepack").is_dir() else ROOT  # a page may work on a copy of the tree
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'loaders'}",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }


def copy_tree(folder: Path) -> None:
    """Copy the tree into a page's folder, for the pages that change it."""
    for name in ("stagepack", "loaders", "schema", "tools", "docs", "examples", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "frozen"))
        else:
            shutil.copy(source, folder / name)
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
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.suppress(EOFError):
        while True:
            source, line = connection.recv()
            name = f"<block of line {line}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            problem = ""
            with contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    exec(compile(source, name, "exec"), namespace)  # noqa: S102 - the project's own docs
                except BaseException:  # noqa: BLE001 - whatever it is, the reader of the test must see it
                    problem = traceback.format_exc()
            connection.send((output.getvalue(), problem))


def _run_stagepack(words: list[str], folder: str, log: str, environment: Mapping[str, str]) -> None:
    """Run the `stagepack` command in this process, with its output in a file."""
    from stagepack.cli import main  # noqa: PLC0415 - in the child

    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
    sys.argv = words
    try:
        main(prog_name="stagepack")
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()


def _wait(process: "subprocess.Popen[bytes] | ForkServerProcess") -> int:
    """Wait for a process; return its exit status."""
    if isinstance(process, subprocess.Popen):
        return process.wait(timeout=_PATIENCE)
    process.join(_PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise RuntimeError(f"a command ran for more than {_PATIENCE} s")
    return process.exitcode


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def check_output(block: Block, following: Block | None, outputs: list[str], is_same: Callable[[str, str], bool]) -> str:
    """What is wrong with the outputs of a block; empty when they are what the page states."""
    if block.kind == "python":
        stated = [following.source if following is not None and following.kind == "output" else ""]
    elif block.kind == "console":
        stated = [command.output for command in read_commands(block.source)]
    else:
        return ""
    wrong = [(want, found) for want, found in zip(stated, outputs, strict=True) if not is_same(want, found)]
    return "\n".join(f"the page states:\n{want}\nthe run printed:\n{found}" for want, found in wrong)
