"""The scheduler with stages that run elsewhere: no thread waits for them, and every call is answered."""

import gc
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy
import pytest

from stagepack_serving.server.scheduler import BatchRunner, CallBatch, QueuedCall, Scheduler

WAIT_SECONDS = 20


class RemoteRunner:
    """Its batches have run when the test says so. Implements `BatchRunner`."""

    lanes = ((0,),)
    most_batches = 2

    def __init__(self) -> None:
        self.started: list[Future[Any]] = []
        self.has_started = threading.Semaphore(0)
        self.finish_threads: set[str] = set()

    def begin(self, inputs: Mapping[str, Any]) -> Any:
        return dict(inputs)

    def run_stage(self, stage_number: int, values: Any, sequence: Any) -> "Future[Any]":
        values["result"] = result = Future[Any]()
        self.started.append(result)
        self.has_started.release()
        return result

    def finish(self, values: Any, sequence: Any) -> Mapping[str, Any]:
        self.finish_threads.add(threading.current_thread().name)
        values["result"].result()
        return {"y": values["x"] + 1}

    def next_started(self) -> "Future[Any]":
        assert self.has_started.acquire(timeout=WAIT_SECONDS)
        return self.started.pop(0)


def schedule(runner: Any, max_batch_size: int = 1) -> Scheduler:
    checked_runner: BatchRunner = runner

    def ignore(_: CallBatch) -> None:
        pass

    return Scheduler(checked_runner, max_batch_size=max_batch_size, batching_delay=0, on_start=ignore, on_end=ignore)


def submit(scheduler: Scheduler, value: int, batch_key: str | None = None) -> "Future[Mapping[str, Any]]":
    call = QueuedCall(inputs={"x": numpy.array([value])}, batch_key=batch_key)
    scheduler.submit(call)
    return call.answer


def test_the_answer_is_set_in_the_thread_that_brings_the_result() -> None:
    runner = RemoteRunner()
    scheduler = schedule(runner)
    answer = submit(scheduler, 1)
    runner.next_started().set_result(None)
    assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
    assert runner.finish_threads == {threading.current_thread().name}
    assert scheduler.close(WAIT_SECONDS)


def test_calls_wait_while_as_many_batches_run_as_may() -> None:
    runner = RemoteRunner()
    scheduler = schedule(runner)
    answers = [submit(scheduler, value) for value in range(3)]
    first, second = runner.next_started(), runner.next_started()
    assert not runner.has_started.acquire(timeout=0.2)
    first.set_result(None)
    runner.next_started().set_result(None)
    second.set_result(None)
    assert [answer.result(timeout=WAIT_SECONDS)["y"][0] for answer in answers] == [1, 2, 3]
    assert scheduler.close(WAIT_SECONDS)


def test_an_error_is_that_of_its_call() -> None:
    runner = RemoteRunner()
    scheduler = schedule(runner)
    failing_answer, other_answer = submit(scheduler, 1), submit(scheduler, 2)
    runner.next_started().set_exception(ValueError("no answer"))
    with pytest.raises(ValueError, match="no answer"):
        failing_answer.result(timeout=WAIT_SECONDS)
    runner.next_started().set_result(None)
    assert other_answer.result(timeout=WAIT_SECONDS)["y"] == [3]
    assert scheduler.close(WAIT_SECONDS)


def test_the_calls_of_a_batch_that_fails_run_alone() -> None:
    runner = RemoteRunner()
    runner.most_batches = 1
    scheduler = schedule(runner, max_batch_size=2)
    blocking_answer = submit(scheduler, 0)
    blocking = runner.next_started()
    answers = [submit(scheduler, value, batch_key="one") for value in (1, 2)]
    blocking.set_result(None)
    assert blocking_answer.result(timeout=WAIT_SECONDS)["y"] == [1]
    runner.next_started().set_exception(ValueError("one of two"))
    for error in (ValueError("the first"), None):
        started = runner.next_started()
        started.set_result(None) if error is None else started.set_exception(error)
    with pytest.raises(ValueError, match="the first"):
        answers[0].result(timeout=WAIT_SECONDS)
    assert answers[1].result(timeout=WAIT_SECONDS)["y"] == [3]
    assert scheduler.close(WAIT_SECONDS)


class Mark:
    """Stands for a large value."""


def test_values_are_freed_with_the_answer() -> None:
    marks: list[weakref.ref[Mark]] = []

    class MarkingRunner(RemoteRunner):
        def begin(self, inputs: Mapping[str, Any]) -> Any:
            mark = Mark()
            marks.append(weakref.ref(mark))
            return super().begin(inputs) | {"mark": mark}

    runner = MarkingRunner()
    scheduler = schedule(runner)
    gc.disable()
    try:
        answer = submit(scheduler, 1)
        started = runner.next_started()
        assert marks[0]() is not None
        started.set_result(None)
        assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
        assert marks[0]() is None
    finally:
        gc.enable()
    assert scheduler.close(WAIT_SECONDS)


def test_close_waits_for_batches_that_run_elsewhere() -> None:
    runner = RemoteRunner()
    scheduler = schedule(runner)
    answer = submit(scheduler, 1)
    started = runner.next_started()
    assert not scheduler.close(0.2)
    started.set_result(None)
    assert answer.result(timeout=WAIT_SECONDS)["y"] == [2]
    assert scheduler.close(WAIT_SECONDS)
