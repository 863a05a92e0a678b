"""Pipelines that are closed late, twice, never, or while they start: nothing hangs, nothing is left behind, statuses are kept."""

import gc
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import GroupError, NotABundleError, OptionError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.pipeline_sequence import PipelineSequence
from tests.distributed.bundles import assert_gone, in_processes, process_ids, run_python
from tests.distributed.forked_processes import forked_launches
from tests.distributed.operators import Waiting
from tests.waiting import wait_until
from tools.fork_server import run_forked

IDS = torch.arange(6)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("waiting") / "waiting.stagepack"
    return stagepack.export(Waiting(), (torch.zeros(3),), out=out, split_at=["second"])


@pytest.fixture
def forks() -> Iterator[None]:
    """Fork processes, also those that are started again."""
    with forked_launches():
        yield


def run_script(lines: Sequence[str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_python("-c", "\n".join(lines), *arguments)


def is_running(process_id: int) -> bool:
    """Whether a process that this one has not started runs."""
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("last_line", "status"),
    [
        ("pipeline.close()", 0),
        pytest.param("", 0, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        pytest.param("raise ValueError", 1, marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_with_its_own_status_and_its_process(
    layers: Bundle, tmp_path: Path, last_line: str, status: int
) -> None:
    script = tmp_path / "script.py"
    lines = [
        "import sys, torch, stagepack",
        "pipeline = stagepack.load(sys.argv[1], processes=1)",
        "print(*{facts.process_id for facts in pipeline.stage_facts}, flush=True)",
        "assert torch.equal(pipeline(torch.arange(4)), stagepack.load(sys.argv[1])(torch.arange(4)))",
        last_line,
    ]
    script.write_text("\n".join(lines))
    finished = run_python(str(script), str(layers.path))
    assert finished.returncode == status, finished.stderr
    assert "terminate called" not in finished.stderr
    assert status or finished.stderr == ""
    number = int(finished.stdout)
    assert not is_running(number)
    if last_line == "pipeline.close()":  # it has waited for the process
        assert not Path(f"/proc/{number}").exists()


def test_a_fork_has_results_of_its_own_and_leaves_the_pipeline_to_its_parent(layers: Bundle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = [
        "import os, sys, torch, stagepack",
        "pipeline = stagepack.load(sys.argv[1], processes=1)",
        "ids = torch.arange(2_000) % 10",
        "result, expected = pipeline(ids), pipeline(ids).clone()",
        "if not os.fork():",
        "    result.zero_()",
        "    try:",
        "        pipeline(ids)",
        "    except stagepack.errors.OptionError as error:",
        "        print(error)",
        "    pipeline.close()",
        "    sys.exit()",
        "assert os.wait()[1] == 0",
        "assert torch.equal(result, expected) and torch.equal(pipeline(ids), expected)",
        "pipeline.close()",
    ]
    script.write_text("\n".join(lines))
    finished = run_forked(str(layers.path), script=script)
    assert finished.returncode == 0, finished.stderr
    assert "this process is a fork of the one that has loaded the pipeline" in finished.stdout


def test_a_pipeline_that_nobody_has_any_more_ends_its_processes(layers: Bundle) -> None:
    with forked_launches():
        pipeline = stagepack.load(layers, processes=2)
    pipeline(IDS)
    numbers = process_ids(pipeline)
    del pipeline
    gc.collect()
    wait_until(lambda: not any(map(is_running, numbers.values())))


@pytest.mark.slow
def test_a_pipeline_that_nobody_has_any_more_while_its_processes_start_again_ends_them(tmp_path: Path) -> None:
    example = (torch.full((3,), 0.5),)  # the time in which the example is run
    bundle = stagepack.export(Waiting(), example, out=tmp_path / "waiting.stagepack", split_at=["second"])
    pipeline = stagepack.load(
        bundle, processes=1, max_restarts=1, imports=[Waiting.__module__], allow_ops=["stagepack_waiting"]
    )
    first_process = process_ids(pipeline)[1]
    os.kill(first_process, signal.SIGKILL)
    while (second_process := process_ids(pipeline)[1]) == first_process:
        time.sleep(0.01)
    del pipeline  # the thread that runs the example has the last reference
    wait_until(lambda: not is_running(second_process))
    wait_until(lambda: not any(thread.name == "restart" for thread in threading.enumerate()))


def test_a_closed_pipeline_keeps_no_files_open(layers: Bundle) -> None:
    def close_one() -> None:
        with stagepack.load(layers, processes=1) as pipeline:
            pipeline(IDS)
        pipelines.append(pipeline)

    pipelines: list[Any] = []
    with forked_launches():
        close_one()
    gc.collect()
    file_count = len(os.listdir("/proc/self/fd"))
    close_one()
    assert len(os.listdir("/proc/self/fd")) <= file_count


@pytest.mark.slow
def test_closing_gives_up_the_example_of_a_restart(tmp_path: Path) -> None:
    bundle = stagepack.export(Waiting(), (torch.full((3,), 2.0),), out=tmp_path / "waiting", split_at=["second"])
    with in_processes(bundle, 1, imports=[Waiting.__module__], max_restarts=1) as pipeline:
        first_process = process_ids(pipeline)[1]
        os.kill(first_process, signal.SIGKILL)
        wait_until(lambda: process_ids(pipeline)[1] != first_process)
        numbers, started = process_ids(pipeline), time.monotonic()
        pipeline.close()
        assert time.monotonic() - started < 1.5
    assert_gone(numbers)


def test_a_callback_that_submits_while_the_pipeline_closes_is_refused(waiting: Bundle) -> None:
    seconds, calls = torch.full((3,), 0.5), []
    with in_processes(waiting, imports=[Waiting.__module__]) as pipeline:
        call = pipeline.submit(seconds)
        call.add_done_callback(lambda _: calls.append(pipeline.submit(seconds)))
    assert torch.equal(call.result(), seconds * 2)
    with pytest.raises(StageLostError, match="the pipeline is closed"):
        calls[0].result()


def test_a_callback_cannot_close_the_pipeline(waiting: Bundle) -> None:
    errors: list[str] = []

    def close(_: Any) -> None:
        try:
            pipeline.close()
        except OptionError as error:
            errors.append(str(error))

    with in_processes(waiting, imports=[Waiting.__module__]) as pipeline:
        call = pipeline.submit(torch.full((3,), 0.5))
        call.add_done_callback(close)
        call.result()
        wait_until(lambda: bool(errors))
        assert pipeline(torch.zeros(3)).shape == (3,)
    assert "nor close the pipeline" in errors[0]


def test_calls_that_a_lost_pipeline_refuses_are_not_kept(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(lambda: pipeline.has_ended)
        references = []
        for _ in range(3):
            ids = IDS.clone()
            references.append(weakref.ref(ids))
            with pytest.raises(StageLostError):
                pipeline(ids)
        del ids
        gc.collect()
        assert not any(reference() is not None for reference in references)


def test_the_inputs_of_a_call_are_not_kept_after_it(layers: Bundle) -> None:
    with forked_launches(), stagepack.load(layers, processes=2) as pipeline:
        ids = IDS.clone()
        reference = weakref.ref(ids)
        pipeline(ids)
        del ids
        gc.collect()
        wait_until(lambda: reference() is None)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_the_others_connect_is_found(layers: Bundle, rank: int) -> None:
    script = [
        "import os, signal, sys, time, stagepack",
        "from pathlib import Path",
        "from stagepack_loaders.distributed import process_group",
        "def connect(*arguments):",
        "    children = [int(n) for path in Path('/proc/self/task').glob('*/children') for n in path.read_text().split()]",
        "    os.kill(next(n for n in children if sys.argv[2].encode() in Path(f'/proc/{n}/cmdline').read_bytes()), signal.SIGKILL)",
        "    kills.append(time.monotonic())",
        "    return connect_all(*arguments)",
        "kills, connect_all, process_group._connect = [], process_group._connect, connect",
        "try:",
        "    stagepack.load(sys.argv[1], processes=2)",
        "except stagepack.errors.StageLostError as error:",
        "    print(kills[0], time.monotonic(), error, flush=True)",
    ]
    finished = run_script(script, str(layers.path), f'"rank": {rank},')
    ended = time.monotonic()
    assert (finished.returncode, "terminate called" in finished.stderr) == (0, False), finished.stderr
    kill_time, error_time, error = finished.stdout.split(maxsplit=2)
    assert float(error_time) - float(kill_time) < 30  # not the 60 s in which processes must come
    assert ended - float(error_time) < 30
    assert re.search(rf": process {rank} on .* lost.*signal 9", error)


@pytest.mark.slow
def test_processes_that_still_start_end_with_the_one_that_started_them(layers: Bundle) -> None:
    script = [
        "import os, sys, threading, time, stagepack",
        "def children():",
        "    tasks = os.listdir('/proc/self/task')",
        "    return [c for t in tasks for c in open(f'/proc/self/task/{t}/children').read().split()]",
        "def die():",
        "    time.sleep(6)",  # they have imported torch, and wait for the module
        "    print(*children(), flush=True)",
        "    os._exit(9)",
        "threading.Thread(target=die).start()",
        "stagepack.load(sys.argv[1], processes=2, imports=['tests.distributed.never_ready'])",
    ]
    finished = run_script(script, str(layers.path))
    numbers = [int(number) for number in finished.stdout.split()]
    assert (finished.returncode, len(numbers)) == (9, 2)
    wait_until(lambda: not any(map(is_running, numbers)))


@pytest.mark.slow
def test_restarts_read_the_bundle_of_a_relative_path(
    layers: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"not utf-8 \xff")
    shutil.copytree(layers.path, folder / layers.path.name)
    monkeypatch.chdir(folder)
    with stagepack.load(layers.path.name, processes=1, max_restarts=1) as pipeline:
        monkeypatch.chdir(tmp_path)
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(lambda: pipeline.restart_count == 1)
        assert pipeline(IDS).shape == (6, 16)


@pytest.mark.usefixtures("forks")
def test_closing_gives_up_restarts_that_fail(layers: Bundle, tmp_path: Path) -> None:
    bundle = Bundle(shutil.copytree(layers.path, tmp_path / "copy.stagepack"))
    pipeline = stagepack.load(bundle, processes=1, max_restarts=1000)
    os.kill(process_ids(pipeline)[1], signal.SIGKILL)
    shutil.rmtree(bundle.path)
    wait_until(lambda: isinstance(pipeline.lost, NotABundleError))  # told by the process that was started again
    started = time.monotonic()
    pipeline.close()
    assert time.monotonic() - started < 30
    assert "ended" in repr(pipeline)


@pytest.mark.usefixtures("forks")
def test_an_interrupted_close_ends_the_processes(waiting: Bundle) -> None:
    pipeline = stagepack.load(waiting, processes=2, imports=[Waiting.__module__], allow_ops=["stagepack_waiting"])
    numbers = process_ids(pipeline)
    pipeline.submit(torch.full((3,), 60.0))
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.close()
    timer.join()
    assert not any(map(is_running, numbers.values()))
    pipeline.close()


def test_a_callback_must_not_wait_for_another_call(layers: Bundle) -> None:
    errors: list[Exception] = []
    has_run = threading.Event()

    with in_processes(layers, in_flight=2) as pipeline:

        def attempt(wait: Any) -> None:
            try:
                wait()
            except OptionError as error:
                errors.append(error)

        def call_again(_: Any) -> None:
            attempt(lambda: pipeline(IDS))
            attempt(lambda: pipeline.submit(IDS).result())
            has_run.set()

        call = pipeline.submit(IDS)
        assert not call.cancel()
        call.add_done_callback(call_again)
        assert call.result().shape == (6, 16)
        if not has_run.wait(10):
            raise AssertionError("the callback has not run")
        assert pipeline(IDS).shape == (6, 16)
    # A callback that is added to an answered call runs at once, in the thread that adds it.
    assert all("cannot wait for another call" in str(error) for error in errors)


def test_state_of_a_forgotten_sequence_is_freed(counting: Bundle) -> None:
    with in_processes(counting) as pipeline:
        for _ in range(5):
            pipeline.sequence()(torch.ones(4))
        gc.collect()
        pipeline(torch.ones(4))
        wait_until(lambda: all(status.sequences == 0 for status in pipeline.statuses().values()))


def test_a_sequence_that_is_closed_during_a_call_ends_after_it() -> None:
    events: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def submit(*_: Any) -> "Future[Any]":
        has_begun.set()
        may_end.wait(10)
        events.append("call")
        return Future()

    def end() -> None:
        events.append("end")

    sequence = PipelineSequence(submit, end, end)
    caller = threading.Thread(target=sequence.submit)
    caller.start()
    has_begun.wait(10)
    sequence.close()
    with pytest.raises(OptionError, match="the sequence is closed"):
        sequence.submit()
    may_end.set()
    caller.join()
    sequence.close()
    assert events == ["call", "end"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("tests.distributed.no_memory", "RuntimeError: not enough memory"),
        ("no_such_module", "ModuleNotFoundError: .*no_such"),
    ],
)
def test_a_process_that_cannot_begin_is_named(layers: Bundle, module: str, reason: str) -> None:
    message = rf"process \d, which runs stage \d, cannot begin: {reason}"
    with pytest.raises(GroupError, match=message), in_processes(layers, imports=[module]):
        pass
