"""Kill writers at random moments, and look at what they leave: ``python -m tools.kill_writers --kills 200``.

A run is a process forked from this one, which has torch imported, and gets SIGKILL or SIGTERM: every second one at any moment, the others
after their temporary folder has appeared. After each kill, the output must not exist, or be the bundle that was there before or the one
that a whole run writes, with right digests and answers. After every tenth kill and the last one a run ends by itself: nothing else may
be left beside its output then, nor in the folder of temporary files. Prints a line for each writer; the exit status is 1 if any is wrong.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

# Forked processes must not wait for threads that they do not have.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
import torch.distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

import stagepack
import stagepack.remote.pull
import stagepack.roads.onnx.add
import stagepack.roads.save
from stagepack.cli import main as command_line
from stagepack_loaders.example import replay_example
from tests.remote.http_server import HttpServer

WIDTH = 512
_RUNS_BETWEEN = 10
_SECONDS = 120


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """The model that is exported."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers).eval(), (torch.ones(2, WIDTH),)


def _save(source: Path, out: Path) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = stagepack.train(source, torch.nn.functional.mse_loss, microbatches=1, schedule="looped-bfs")
    with torch.no_grad():
        for parameter in training.parameters():
            parameter.mul_(2.0)
    stagepack.save(training, out=out, overwrite=True)


@dataclass
class Writer:
    """A writer in a folder of its own.

    Attributes:
        folder: the folder of the output.
        write: called in a forked process.
        replaces: whether the output is there before.
        is_bundle: whether the output is a bundle, and not a folder of native code.
        source: the bundle that it reads.
        digests: the digests that the output may have.
        endings: how often the output was missing, old or new.
    """

    folder: Path
    write: Callable[[Path], object]
    source: Path
    replaces: bool = False
    is_bundle: bool = True
    digests: set[str] = field(default_factory=set)
    endings: Counter[str] = field(default_factory=Counter)

    @property
    def out(self) -> Path:
        """The output."""
        return self.folder / "out.stagepack"

    def prepare(self) -> None:
        """Bring the output into the state in which a run finds it."""
        if not self.replaces and self.out.exists():
            shutil.rmtree(self.out)
        if self.replaces and not self.out.exists():
            shutil.copytree(self.source, self.out)

    def problem(self) -> str:
        """Return the fault of the output; an empty text if it has none."""
        if not self.out.exists():
            self.endings["missing"] += 1
            return ""
        if not self.is_bundle:
            self.endings["new"] += 1
            return _outcome_of(lambda: _check_compiled(self.source, self.out))
        try:
            digest = stagepack.open(self.out).digest
        except stagepack.StagepackError as error:
            return f"does not open: {error}"
        self.endings["old" if digest == stagepack.open(self.source).digest else "new"] += 1
        if self.digests and digest not in self.digests:
            return f"has the digest {digest}"
        return _outcome_of(lambda: _check_bundle(self.out))


def _check_bundle(path: Path) -> None:
    bundle = stagepack.open(path)
    bundle.verify()
    if not replay_example(stagepack.load(bundle)).within:
        raise SystemExit("answers are wrong")


def _check_compiled(source: Path, folder: Path) -> None:
    bundle = stagepack.open(source)
    if not replay_example(stagepack.load(bundle, compiled=folder)).within:
        raise SystemExit("answers are wrong")


def _start(action: Callable[[], object], log: Path) -> int:
    """Run a function in a forked process."""
    process = os.fork()
    if process:
        return process
    exit_status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        action()
        exit_status = 0
    except SystemExit as error:
        print(error, file=sys.stderr)
        exit_status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the process must not go on as this one
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(exit_status)


def _wait(process: int) -> int:
    """Return the exit status of a forked process, which is ended when it takes too long."""
    deadline = time.monotonic() + _SECONDS
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def _outcome_of(action: Callable[[], object]) -> str:
    with tempfile.NamedTemporaryFile() as log:
        if status := _wait(_start(action, Path(log.name))):
            return f"exit status {status}: {Path(log.name).read_text()[-500:]}"
    return ""


def _measure(writer: Writer, log: Path) -> tuple[float, float]:
    """Return the seconds of a whole run, and those after its temporary folder has appeared."""
    writer.prepare()
    start, before = time.monotonic(), set(os.listdir(writer.folder))
    process, appeared = _start(lambda: writer.write(writer.out), log), start
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if appeared == start and set(os.listdir(writer.folder)) != before:
            appeared = time.monotonic()
        time.sleep(0.001)
    end = time.monotonic()
    if status := _wait(process):
        raise SystemExit(f"{writer.folder.name}: a run without a kill ended with {status}: {log.read_text()}")
    return end - start, end - appeared


def _kill_once(writer: Writer, moment: float, *, after_folder: bool, signal_number: int, log: Path) -> None:
    writer.prepare()
    before = set(os.listdir(writer.folder))
    process = _start(lambda: writer.write(writer.out), log)
    while after_folder and set(os.listdir(writer.folder)) <= before:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    time.sleep(moment)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal_number)
    _wait(process)


def kill_writer(writer: Writer, kills: int, seed: int, temporary: Path) -> list[str]:
    """Kill a writer at random moments.

    Args:
        writer: the writer.
        kills: how often.
        seed: of the moments.
        temporary: the folder of temporary files.

    Returns:
        What was wrong.
    """
    generator = random.Random(seed)  # noqa: S311 - repeatable
    log = writer.folder.with_suffix(".log")
    _measure(writer, log)
    whole_seconds, writing_seconds = _measure(writer, log)
    if writer.is_bundle:
        writer.digests = {stagepack.open(writer.out).digest}
        if writer.replaces:
            writer.digests.add(stagepack.open(writer.source).digest)
    problems = [writer.problem()]
    # Libraries keep files there, such as ONNX Runtime.
    kept = set(os.listdir(temporary))
    writer.endings.clear()
    leftover_count = 0
    for index in range(kills):
        after_folder = index % 2 == 1
        moment = generator.uniform(0, writing_seconds if after_folder else whole_seconds)
        signal_number = generator.choice([signal.SIGKILL, signal.SIGTERM])
        _kill_once(writer, moment, after_folder=after_folder, signal_number=signal_number, log=log)
        remaining = [entry for entry in os.listdir(writer.folder) if entry != writer.out.name]
        leftover_count += bool(remaining)
        problems.append(writer.problem())
        if index % _RUNS_BETWEEN == _RUNS_BETWEEN - 1 or index == kills - 1:
            _measure(writer, log)
            problems.append(_left_over(writer, {*os.listdir(temporary)} - kept))
    found = [problem for problem in problems if problem]
    print(
        f"{writer.folder.name:8} {kills} kills in runs of {whole_seconds:.2f} s ({writing_seconds:.2f} s with a temporary folder): "
        f"{dict(sorted(writer.endings.items()))}, {leftover_count} times something was left for the next run; {len(found)} wrong",
        flush=True,
    )
    return found


def _left_over(writer: Writer, temporary_names: set[str]) -> str:
    entries = {*os.listdir(writer.folder), *temporary_names} - {writer.out.name}
    return f"left over after a whole run: {sorted(entries)}" if entries else ""


def writers(folder: Path, url: str) -> dict[str, Writer]:
    """The writers by name, each of which reads the bundle ``source.stagepack`` of a folder.

    Args:
        folder: the folder.
        url: that of its files.
    """
    source = folder / "source.stagepack"

    def run(*arguments: str) -> Callable[[Path], object]:
        return lambda out: command_line([argument.replace("OUT", str(out)) for argument in arguments])

    cut = ("--stages", "2", "--overwrite")
    commands = {
        "export": run("export", f"{__file__}:model", *cut, "-o", "OUT"),
        "recut": run("recut", str(source), *cut, "-o", "OUT"),
        "onnx": run("onnx", "OUT"),
        "compile": run("compile", str(source), "-o", "OUT", "--device", "cpu"),
        "save": lambda out: _save(source, out),
        "pull": run("pull", f"{url}/source.stagepack", "-o", "OUT"),
    }
    return {
        writer_name: Writer(
            folder=folder / writer_name,
            write=write,
            source=source,
            replaces=writer_name not in ("compile", "pull"),
            is_bundle=writer_name != "compile",
        )
        for writer_name, write in commands.items()
    }


def _serve(folder: Path, port_file: Path) -> None:
    with HttpServer(folder) as server:
        port_file.write_text(server.url)
        while os.getppid() != 1:
            time.sleep(0.2)


def _export_source(path: Path) -> None:
    module, arguments = model()
    stagepack.export(module, arguments, out=path, stages=3)


def run(kills: int, names: Collection[str], seed: int) -> bool:
    """Kill writers. Return whether all was right."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder, temporary, url_path = Path(work), Path(work, "tmp"), Path(work, "url.txt")
        temporary.mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        if problem := _outcome_of(lambda: _export_source(folder / "source.stagepack")):
            raise SystemExit(problem)
        server = _start(lambda: _serve(folder, url_path), folder / "server.log")
        while not (url_path.is_file() and url_path.read_text()):
            time.sleep(0.01)
        found = []
        # Temporary files of the processes that are killed, and not of this one.
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        try:
            for writer_name, writer in writers(folder, url_path.read_text()).items():
                if writer_name in names:
                    writer.folder.mkdir()
                    found += [f"{writer_name}: {problem}" for problem in kill_writer(writer, kills, seed, temporary)]
        finally:
            os.kill(server, signal.SIGKILL)
            _wait(server)
            tempfile.tempdir = None
        print(*found, sep="\n")
        return not found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of each writer")
    parser.add_argument("--seed", type=int, default=0)
    names = ["export", "recut", "onnx", "compile", "save", "pull"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the writers")
    options = parser.parse_args()
    sys.exit(not run(options.kills, options.only, options.seed))


if __name__ == "__main__":
    main()
