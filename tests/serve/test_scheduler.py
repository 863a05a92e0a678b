"""The scheduler with stages that run elsewhere: no thread waits for them, and every call is answered, also when a thread ends."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import StageLostError
from stagepack.format.manifest import Edge
from stagepack_loaders.executor import CallOptions
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.versions import StageVersion
from stagepack_serving.protocol.interface import InterfaceTensor
from stagepack_serving.server.scheduler import CallBatch, QueuedCall, Scheduler
from tests.distributed.bundles import tree_environment

WAIT_SECONDS = 20


def tensor(name: str, producer: int | None) -> InterfaceTensor:
    edge = Edge(name=name, dtype="int64", shape=("rows",), producer=producer, consumers=(0,))
    return InterfaceTensor(name=name, edge=edge)


class RemoteExecutor:
    """Its calls have run when the test says so: then they add 1. An input of -3 ends the thread that submits it."""

    arrays = NUMPY_ARRAYS
    most_calls = 2
    returns_state = False
    version: Any = StageVersion(name="1", bundle=None)  # type: ignore[arg-type] # no test asks for it

    def __init__(self) -> None:
        self.submitted: list[tuple[Mapping[str, Any], Future[Any]]] = []
        self.sizes: list[Mapping[str, int]] = []
        self.options: list[CallOptions] = []
        self.has_submitted = threading.Semaphore(0)

    def submit(self, values: dict[str, Any], sizes: Mapping[str, int], _: Any, options: CallOptions) -> "Future[Any]":
        if values["x"][0] == -3:
            raise SystemExit(3)
        answer = Future[Any]()
        self.submitted.append((values, answer))
        self.sizes.append(sizes)
        self.options.append(options)
        self.has_submitted.release()
        return answer

    def finish_next(self, error: Exception | None = None) -> None:
        assert self.has_submitted.acquire(timeout=WAIT_SECONDS)
        values, answer = self.submitted.pop(0)
        if error is None:
            answer.set_result({"y": values["x"] + 1})
        else:
            answer.set_exception(error)


def schedule(executor: Any, max_batch_size: int = 1, *, batching_delay: float = 0) -> Scheduler:
    given, made = tensor("x", None), tensor("y", 0)
    interface: Any = SimpleNamespace(inputs={"x": given}, outputs={"y": made}, call_edges={"x": given.edge})

    def ignore(_: CallBatch) -> None:
        pass

    return Scheduler(
        executor,
        interface,
        max_batch_size=max_batch_size,
        batching_delay=batching_delay,
        on_start=ignore,
        on_end=ignore,
    )


def submit(scheduler: Scheduler, value: int, batch_key: str | None = None) -> "Future[Mapping[str, Any]]":
    call = QueuedCall(inputs={"x": numpy.array([value])}, sizes={"rows": 1}, batch_key=batch_key)
    scheduler.submit(call)
    return call.answer


def test_the_answer_is_set_in_the_thread_that_brings_the_result() -> None:
    executor = RemoteExecutor()
    scheduler = schedule(executor)
    answer = submit(scheduler, 1)
    threads: list[threading.Thread] = []
    answer.add_done_callback(lambda _: threads.append(threading.current_thread()))
    executor.finish_next()
    assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
    assert threads == [threading.current_thread()]
    assert scheduler.close(WAIT_SECONDS)


def test_calls_wait_while_as_many_batches_run_as_may() -> None:
    executor = RemoteExecutor()
    scheduler = schedule(executor)
    answers = [submit(scheduler, value) for value in range(3)]
    assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
    assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
    assert not executor.has_submitted.acquire(timeout=0.2)
    executor.has_submitted.release(2)
    for _ in range(3):
        executor.finish_next()
    assert [answer.result(timeout=WAIT_SECONDS)["y"][0] for answer in answers] == [1, 2, 3]
    assert scheduler.close(WAIT_SECONDS)


def test_an_error_is_that_of_its_call() -> None:
    executor = RemoteExecutor()
    scheduler = schedule(executor)
    failing_answer, other_answer = submit(scheduler, 1), submit(scheduler, 2)
    executor.finish_next(ValueError("no answer"))
    with pytest.raises(ValueError, match="no answer"):
        failing_answer.result(timeout=WAIT_SECONDS)
    executor.finish_next()
    assert other_answer.result(timeout=WAIT_SECONDS)["y"] == [3]
    assert scheduler.close(WAIT_SECONDS)


def test_the_calls_of_a_batch_that_fails_run_alone() -> None:
    executor = RemoteExecutor()
    executor.most_calls = 1
    scheduler = schedule(executor, max_batch_size=2)
    blocking_answer = submit(scheduler, 0)
    assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
    answers = [submit(scheduler, value, batch_key="one") for value in (1, 2)]
    executor.has_submitted.release()
    executor.finish_next()
    assert blocking_answer.result(timeout=WAIT_SECONDS)["y"] == [1]
    executor.finish_next(ValueError("one of two"))
    executor.finish_next(ValueError("the first"))
    executor.finish_next()
    with pytest.raises(ValueError, match="the first"):
        answers[0].result(timeout=WAIT_SECONDS)
    assert answers[1].result(timeout=WAIT_SECONDS)["y"] == [3]
    assert executor.sizes == [{"rows": 1}, {"rows": 2}, {"rows": 1}, {"rows": 1}]
    assert scheduler.close(WAIT_SECONDS)


def test_a_batch_is_cancelled_when_nobody_waits_for_any_of_its_calls() -> None:
    executor = RemoteExecutor()
    executor.most_calls = 1
    scheduler = schedule(executor, max_batch_size=2)
    blocking_answer = submit(scheduler, 0)
    assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
    calls = [QueuedCall(inputs={"x": numpy.array([value])}, batch_key="one") for value in (1, 2)]
    for call in calls:
        scheduler.submit(call)
    executor.has_submitted.release()
    executor.finish_next()
    assert blocking_answer.result(timeout=WAIT_SECONDS)["y"] == [1]
    assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
    executor.has_submitted.release()
    cancellation = executor.options[-1].cancellation
    assert cancellation is not None
    scheduler.abandon(calls[0])
    assert not cancellation.done()
    scheduler.abandon(calls[1])
    assert cancellation.done()
    executor.finish_next(CancelledError())  # the calls are not run again
    assert not submit(scheduler, 3).done()
    executor.finish_next()
    assert scheduler.close(WAIT_SECONDS)
    assert not executor.submitted


def test_a_call_that_would_be_answered_too_late_does_not_run() -> None:
    executor = RemoteExecutor()
    executor.most_calls = 1
    scheduler = schedule(executor, max_batch_size=2)
    for value in (1, 2):
        submit(scheduler, value)
        time.sleep(0.2)  # the shortest run
        executor.finish_next()
    blocking_answer = submit(scheduler, 0)
    now = time.monotonic()
    calls = [
        QueuedCall(inputs={"x": numpy.array([value])}, sizes={"rows": 1}, batch_key="one", expiry=now + seconds)
        for value, seconds in enumerate((-1, 0.3, 0.3, WAIT_SECONDS))
    ]
    for call in calls:
        scheduler.submit(call)
    time.sleep(0.2)
    executor.finish_next()
    assert blocking_answer.result(timeout=WAIT_SECONDS)["y"] == [1]
    executor.finish_next()
    assert calls[3].answer.result(timeout=WAIT_SECONDS)["y"] == [4]
    for position in range(3):
        with pytest.raises(TimeoutError):
            calls[position].answer.result(timeout=WAIT_SECONDS)
    assert len(executor.sizes) == 4
    assert scheduler.close(WAIT_SECONDS)


class Mark(numpy.ndarray):
    """An array that can be referred to weakly."""


def test_values_are_freed_with_the_answer() -> None:
    marks: list[weakref.ref[Any]] = []

    class MarkingExecutor(RemoteExecutor):
        def submit(
            self, values: dict[str, Any], sizes: Mapping[str, int], _: Any, options: CallOptions
        ) -> "Future[Any]":
            mark = numpy.zeros(1).view(Mark)
            marks.append(weakref.ref(mark))
            values["mark"] = mark
            return super().submit(values, sizes, _, options)

    executor = MarkingExecutor()
    scheduler = schedule(executor)
    gc.disable()
    try:
        answer = submit(scheduler, 1)
        assert executor.has_submitted.acquire(timeout=WAIT_SECONDS)
        assert marks[0]() is not None
        values, result = executor.submitted.pop()
        result.set_result({"y": values["x"] + 1, **values})
        del values, result
        assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
        assert marks[0]() is None
    finally:
        gc.enable()
    assert scheduler.close(WAIT_SECONDS)


def test_close_waits_for_batches_that_run_elsewhere() -> None:
    executor = RemoteExecutor()
    scheduler = schedule(executor)
    answer = submit(scheduler, 1)
    assert not scheduler.close(0.2)
    executor.finish_next()
    assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
    assert scheduler.close(WAIT_SECONDS)


def test_calls_are_answered_when_the_thread_has_ended() -> None:
    executor = RemoteExecutor()
    scheduler = schedule(executor, max_batch_size=2, batching_delay=10)
    joined = [submit(scheduler, 1, batch_key="alike") for _ in range(2)]
    while not executor.submitted:
        time.sleep(0.01)
    last, *queued = [submit(scheduler, value) for value in (-3, 1, 1, 1, 1)]
    with pytest.raises(StageLostError, match=r"the thread of lane 0 has ended: SystemExit: 3"):
        last.result(timeout=WAIT_SECONDS)
    assert not any(answer.done() for answer in joined)  # their batch still runs
    executor.finish_next(ValueError("one of the two cannot be used"))
    assert all(isinstance(answer.exception(timeout=WAIT_SECONDS), StageLostError) for answer in joined)
    queued.append(submit(scheduler, 1))
    assert all(isinstance(answer.exception(timeout=WAIT_SECONDS), StageLostError) for answer in queued)
    assert scheduler.failure
    assert scheduler.close(WAIT_SECONDS)


@pytest.mark.process
def test_the_example_of_a_bundle_leaves_no_threads(tmp_path: Path) -> None:
    """Threads of OpenMP that stay, with more of them than cores, make those of later calls wait in the kernel."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU())
    rows = torch.export.Dim("rows")
    bundle = stagepack.export(model, (torch.randn(512, 512),), out=tmp_path / "m", dynamic_shapes=({0: rows},))
    lines = [
        "import os, sys, time, torch, stagepack",
        "from stagepack_serving.server.limits import ServerLimits",
        "from stagepack_serving.server.metrics import Metrics",
        "from stagepack_serving.server.served_model import ServedModel",
        "pipeline = stagepack.load(sys.argv[1])",
        "before = len(os.listdir('/proc/self/task'))",
        "model = ServedModel('m', pipeline, ServerLimits(), Metrics())",
        "time.sleep(1)  # threads of OpenMP end after the thread that made them",
        "print(model.max_batch_size, len(os.listdir('/proc/self/task')) - before)",
        "model.close(5)",
    ]
    arguments = [sys.executable, "-c", "\n".join(lines), str(bundle.path)]
    environment = tree_environment() | {"OMP_NUM_THREADS": "2"}
    finished = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    # That of the scheduler.
    assert finished.stdout == "32 1\n", finished.stderr


@pytest.mark.parametrize(("digest", "runs_on_newest"), [("new", True), ("old", False)])
def test_a_call_runs_on_its_own_weights_whatever_name_the_newest_have(digest: str, *, runs_on_newest: bool) -> None:
    """A trainer may give two versions one name; processes that were started again have the newest one under another number."""

    def version(digest: str) -> StageVersion:
        bundle: Any = SimpleNamespace(digest=digest)
        return StageVersion(name="same", bundle=bundle)

    executor = RemoteExecutor()
    executor.version = version("new")
    call = QueuedCall(inputs={"x": numpy.array([1])}, sizes={"rows": 1}, version=version(digest))
    schedule(executor).submit(call)
    executor.finish_next()
    call.answer.result(timeout=WAIT_SECONDS)
    assert executor.options[0].version is (executor.version if runs_on_newest else call.version)
