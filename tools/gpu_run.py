"""What `make gpu` runs: the tests marked gpu, then the benchmarks that need a GPU, the most important first, within some minutes.

It needs a checkout, a Python with torch, and the wheels that `tools/gpu_wheels.py` collects, which it installs into a folder of its own;
nothing is downloaded. Each step is a process with a time limit. When it ends, a line is added to ``results.jsonl`` and ``table.md`` is
written anew, so that a run that is cut off still tells. Without CUDA every step is reported as not run. ``--device cpu --size tiny`` tries
the steps themselves without a GPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

# This file uses the standard library alone: on the machine nothing else may be there before the wheels are installed.
ROOT: Final = Path(__file__).parents[1]
DEFAULT_FOLDER: Final = ROOT / "build" / "gpu"
SHORTEST_SECONDS: Final = 10  # with less time left, a step is not started
STOP_SECONDS: Final = 5  # for a step that is ended

FACTS: Final = """
import json, os, platform
facts = {"python": platform.python_version(), "cores": os.cpu_count(), "torch": "", "cuda": "", "gpu": ""}
try:
    import torch
    facts |= {"torch": str(torch.__version__), "cuda": str(torch.version.cuda or "")}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
except ImportError as error:
    facts["error"] = str(error)
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of the run.

    Attributes:
        name: its name, and that of its files.
        arguments: what Python is called with.
        seconds: its time limit.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step.

    Attributes:
        step: its name.
        outcome: ``passed``, ``failed``, ``cut off`` or ``not run``.
        seconds: how long it ran.
        detail: the counts of the tests, or the reason.
    """

    step: str
    outcome: str
    seconds: float
    detail: str


def steps_of(device: str, size: str, folder: Path) -> list[Step]:
    """Return the steps, the most important first.

    Args:
        device: the device.
        size: ``full`` or ``tiny``.
        folder: where their results are written.
    """
    is_tiny = size == "tiny"
    workers = min(8, os.cpu_count() or 1)
    options = ("-q", "-W", "default", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadgroup")
    outcomes = ("--gpu-device", device, f"--outcomes={folder / 'tests.jsonl'}")
    load_sizes = ("--gigabytes", "0.05", "--rounds", "1") if is_tiny else ("--gigabytes", "4", "--rounds", "2")

    def benchmark(name: str, seconds: int, *arguments: str) -> Step:
        return Step(name=name, arguments=("-m", *arguments, "--json", str(folder / f"{name}.json")), seconds=seconds)

    def stages(name: str, seconds: int, *parts: str) -> Step:
        return benchmark(name, seconds, "tools.bench_gpu", *parts, "--device", device, "--size", size)

    return [
        Step(name="tests", arguments=("-m", "pytest", "-m", "gpu", "tests/gpu", *options, *outcomes), seconds=160),
        stages("stages", 150, "memory", "cut", "streams"),
        benchmark("load", 150, "tools.bench_gpu_load", "--device", device, *load_sizes),
        stages("text", 90, "text"),
        stages("serving", 50, "serving"),
    ]


class Run:
    """Runs steps within a time, and writes what came of each.

    Attributes:
        outcomes: what came of the steps so far.
    """

    def __init__(self, folder: Path, seconds: float, environment: dict[str, str]) -> None:
        """Begin.

        Args:
            folder: where the results are written.
            seconds: the time for all steps.
            environment: the environment of their processes.
        """
        self.outcomes: list[Outcome] = []
        self._folder = folder
        self._end = time.monotonic() + seconds
        self._environment = environment
        self._facts: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.json*"), *folder.glob("*.log"), *folder.glob("table.md")):
            path.unlink()

    def machine_facts(self) -> dict[str, Any]:
        """Return what the machine is, and write it."""
        done = subprocess.run(
            [sys.executable, "-c", FACTS], capture_output=True, text=True, timeout=120, env=self._environment
        )
        self._facts = (
            json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
        )
        self._append({"facts": self._facts})
        return self._facts

    def run(self, step: Step) -> None:
        """Run a step within its time and the time that is left."""
        left = self._end - time.monotonic()
        if left < SHORTEST_SECONDS:
            self.add(Outcome(step=step.name, outcome="not run", seconds=0.0, detail="no time was left"))
            return
        limit, started = min(step.seconds, left - STOP_SECONDS), time.monotonic()
        with (self._folder / f"{step.name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *step.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
                outcome = "passed" if status == 0 else "failed"
                detail = "" if status == 0 else f"exit status {status}: {self._last_line(step)}"
            except subprocess.TimeoutExpired:
                _end_session(process)
                outcome, detail = "cut off", f"after {limit:.0f} s: {self._last_line(step)}"
        counts = self._test_counts(step)
        detail = "; ".join(text for text in (counts, detail) if text)
        self.add(Outcome(step=step.name, outcome=outcome, seconds=time.monotonic() - started, detail=detail))

    def add(self, outcome: Outcome) -> None:
        """Take note of what came of a step: print it and write it."""
        self.outcomes.append(outcome)
        print(f"{outcome.step:10} {outcome.outcome:8} {outcome.seconds:6.1f} s  {outcome.detail}", flush=True)
        self._append(asdict(outcome))
        (self._folder / "table.md").write_text("\n".join(self._table()) + "\n")

    def _append(self, record: dict[str, Any]) -> None:
        with (self._folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _last_line(self, step: Step) -> str:
        return (_last_lines(self._folder / f"{step.name}.log", 1) or ["it printed nothing"])[-1][:200]

    def _test_counts(self, step: Step) -> str:
        """The tests that have ended, by outcome; empty for a step of another kind."""
        path = self._folder / f"{step.name}.jsonl"
        if not path.exists():
            return ""
        outcomes = Counter(json.loads(line)["outcome"] for line in path.read_text().splitlines())
        return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())

    def _table(self) -> list[str]:
        """The outcomes, and what the benchmarks have measured."""
        facts = ", ".join(f"{name} {value}" for name, value in self._facts.items() if value)
        lines = [f"{facts}.", "", "| step | outcome | seconds | |", "|---|---|--:|---|"]
        lines += [
            f"| {entry.step} | {entry.outcome} | {entry.seconds:.0f} | {entry.detail} |" for entry in self.outcomes
        ]
        for entry in self.outcomes:
            log = self._folder / f"{entry.step}.log"
            if log.exists() and entry.outcome != "passed":
                lines += ["", f"The end of `{log.name}`:", "", "```text", *_last_lines(log, 20), "```"]
        for path in sorted(self._folder.glob("*.json")):
            for table in json.loads(path.read_text())["tables"]:
                columns = table["columns"]
                lines += ["", f"**{table['title']}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                lines += [f"| {' | '.join(map(_cell, row))} |" for row in table["rows"]]
        return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all steps, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="all of them by default")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--minutes", type=float, default=8.0, help="the time for all steps")
    parser.add_argument("--wheels", type=Path, help="the folder of wheels to install first")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args(arguments)
    started, folder = time.monotonic(), options.out.absolute()
    site = folder / "site"
    paths = [str(ROOT), str(ROOT / "loaders"), str(site)]
    run = Run(folder, options.minutes * 60, os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    if options.wheels:
        install(options.wheels, site)
    register(site)
    facts = run.machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), flush=True)
    steps = [
        step for step in steps_of(options.device, options.size, folder) if step.name in (options.steps or step.name)
    ]
    for step in steps:
        if options.device.startswith("cuda") and not facts.get("gpu"):
            reason = f"no CUDA: torch {facts.get('torch') or 'is missing'} sees no GPU"
            run.add(Outcome(step=step.name, outcome="not run", seconds=0.0, detail=reason))
        else:
            run.run(step)
    shutil.rmtree(site, ignore_errors=True)
    print(f"{time.monotonic() - started:.0f} s; {folder / 'table.md'}")
    sys.exit(any(entry.outcome in ("failed", "cut off") for entry in run.outcomes))


def install(wheels: Path, site: Path) -> None:
    """Install wheels into a folder, and nothing else."""
    shutil.rmtree(site, ignore_errors=True)
    options = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", f"--target={site}")
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, sorted(wheels.glob("*.whl")))]
    subprocess.run(command, check=True)


def register(site: Path) -> None:
    """Write the entry points of the checkout into a folder, as an installation of stagepack would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = site / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    heading = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(heading)
    groups = project["entry-points"].items()
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {home}\n" for name, home in homes.items()) for group, homes in groups
    ]
    (metadata / "entry_points.txt").write_text("\n".join(sections))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS / 2)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last_lines(log: Path, count: int) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()[-count:]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
