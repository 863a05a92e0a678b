"""What users do with a bundle, for bundles that are not what they seem: each action ends in order or with a typed error.

The actions run in a process apart, with bounds on time and memory, so that its end by a signal is seen.
"""

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from stagepack.cli import main
from stagepack.errors import StagepackError
from tests.bundle_editor import MANIFEST_NAME
from tests.fuzz.roads import RoadsDifferError, compare_roads

# Seconds of processor time.
SECONDS = 20
COMPILE_SECONDS = 120
MEMORY_BYTES = 2 * 2**30
JOBS_OF_A_PROCESS = 1000


@dataclass(frozen=True)
class Outcome:
    """How an action ended."""

    # ``ok``, ``refused`` (a typed error), ``exception`` (any other), ``lie`` (two roads that do not answer alike, or a value of another
    # type or shape than stated), ``signal``, ``hang``, ``memory``.
    kind: str
    detail: str = ""  # the message, with the innermost line of code for an exception


@dataclass(frozen=True)
class Case:
    """A bundle to act on."""

    path: Path  # its folder
    original: Path  # the bundle before it was changed
    # Inputs of a call that the original takes, by entry point.
    inputs: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.path / MANIFEST_NAME).read_bytes()).hexdigest()


def command(*arguments: str) -> Callable[[Case, Path], str | None]:
    """Return the action of a subcommand. ``{bundle}``, ``{original}`` and ``{out}`` stand for folders."""

    def act(case: Case, scratch: Path) -> None:
        texts = {"bundle": case.path, "original": case.original, "out": scratch / "out"}
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
            try:
                main.main([argument.format(**texts) for argument in arguments], standalone_mode=False)
            except click.ClickException as failure:
                raise failure.__cause__ or failure from None

    return act


ACTIONS: dict[str, Callable[[Case, Path], str | None]] = {
    "verify": command("verify", "{bundle}"),
    "verify --run": command("verify", "{bundle}", "--run"),
    "inspect --graph": command("inspect", "{bundle}", "--graph"),
    "inspect --json": command("inspect", "{bundle}", "--json"),
    "plan": command("plan", "{bundle}"),
    "plan --stages": command("plan", "{bundle}", "--stages", "2"),
    "plan --profile": command("plan", "{bundle}", "--stages", "2", "--profile", "h100", "--shared", "transmit"),
    "report": command("report", "{bundle}", "-o", "{out}.html"),
    "report --profile": command("report", "{bundle}", "-o", "{out}.html", "--profile", "h100"),
    "roads": lambda case, scratch: compare_roads(case.path, case.original, case.inputs, scratch),
    "recut": command("recut", "{bundle}", "--stages", "2", "-o", "{out}"),
    "recut --stages 1": command("recut", "{bundle}", "--stages", "1", "-o", "{out}"),
    "diff": command("diff", "{bundle}", "{original}"),
    "diff of the original": command("diff", "{original}", "{bundle}"),
    "pull": command("pull", "file://{bundle}", "-o", "{out}"),
    "triton": command("triton", "{bundle}", "-o", "{out}"),
    "profile": command("profile", "{bundle}", "-o", "{out}.json"),
    "load": command("load", "{bundle}"),
    "load --stream": command("load", "{bundle}", "--stream"),
    "load --device-memory": command("load", "{bundle}", "--device-memory", "8KiB"),
    "load --verify off": command("load", "{bundle}", "--verify", "off", "--copy"),
    "load --runtime onnxruntime": command("load", "{bundle}", "--runtime", "onnxruntime"),
    "compile": command("compile", "{bundle}", "-o", "{out}"),
    "onnx": command("onnx", "{bundle}"),  # last: it writes into the bundle
}


def run_apart(jobs: Sequence[tuple[str, Callable[[Path], str | None]]]) -> Iterator[Outcome]:
    """Run jobs, each an action by name, one after the other in forked processes, and yield how each ended.

    A process runs up to `JOBS_OF_A_PROCESS`; after a job that ends it comes another process.
    The caller must not have run any operator of torch in several threads before.
    """
    done = 0
    while done < len(jobs):
        some = jobs[done : done + JOBS_OF_A_PROCESS]
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            try:
                _run_in_child(some, write_end)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write_end)
        first = done
        with os.fdopen(read_end, "rb") as pipe:
            try:
                for line in pipe:
                    done += 1
                    yield Outcome(*json.loads(line))
            except GeneratorExit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            done += 1
            yield Outcome(
                "hang" if number in (signal.SIGPROF, signal.SIGALRM) else "signal", signal.Signals(number).name
            )
        elif done == first or os.waitstatus_to_exitcode(status):
            done += 1
            yield Outcome("signal", f"ended with status {os.waitstatus_to_exitcode(status)}")


def _run_in_child(jobs: Sequence[tuple[str, Callable[[Path], str | None]]], write_end: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for name, action in jobs:
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + 2 * MEMORY_BYTES, resource.RLIM_INFINITY))
        seconds = COMPILE_SECONDS if name == "compile" else SECONDS
        # On a busy machine, a process waits for processors.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(10 * seconds)
        outcome = _run_action(action)
        os.write(write_end, json.dumps([outcome.kind, outcome.detail]).encode() + b"\n")
        if outcome.kind == "memory":  # the peak of a process never falls
            break


def _run_action(action: Callable[[Path], str | None]) -> Outcome:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            detail = action(Path(scratch))
    except RoadsDifferError as error:
        return Outcome("lie", str(error))
    except StagepackError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except click.ClickException as error:
        return Outcome("refused", error.message)
    except BaseException as error:  # noqa: BLE001 - it is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return Outcome("exception", f"{type(error).__name__}: {str(error)[:200]} ({place})")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak_bytes > MEMORY_BYTES:
        return Outcome("memory", f"{peak_bytes / 2**30:.1f} GiB")
    return Outcome("ok", detail or "")
