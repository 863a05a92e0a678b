"""Stages of this process that work on several calls at the same time: a lane for each device, and what happens when its thread ends."""

import gc
import sys
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import StageLostError
from stagepack.format.reader import Bundle
from stagepack.format.tree import value_names
from stagepack_loaders.executor import CallOptions, Executor, LocalExecutor

WAIT_SECONDS = 20


class AddingStage:
    """Adds 1, when the test lets it run; its thread ends at an input of -3."""

    runtime = "torch"

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.has_begun = threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        self.has_begun.set()
        assert self.may_run.wait(WAIT_SECONDS)
        if values[0] == -3:
            raise SystemExit(3)
        return (values[0] + 1,)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    return stagepack.export(model, (torch.ones(2),), out=tmp_path_factory.mktemp("lanes") / "m.stagepack", stages=3)


@pytest.fixture
def stages() -> list[AddingStage]:
    """Two lanes: the stages 0 and 1, and the stage 2."""
    return [AddingStage("cpu"), AddingStage("cpu"), AddingStage("cpu:1")]


def submit(executor: LocalExecutor, bundle: Bundle, number: float) -> Any:
    return executor.submit({bundle.inputs[0].name: torch.tensor(number)}, {})


def result(answer: Any, bundle: Bundle) -> float:
    [leaf] = [edge.name for edge in bundle.edges if edge.producer == 2]
    return float(answer.result(timeout=WAIT_SECONDS)[leaf])


def test_a_lane_runs_the_next_call_while_another_lane_runs_the_first(bundle: Bundle, stages: list[Any]) -> None:
    runs: list[int] = []
    executor = LocalExecutor(bundle, stages, lambda number, seconds: runs.append(number))
    assert executor.most_calls == 3
    stages[2].may_run.clear()
    answers = [submit(executor, bundle, number) for number in range(2)]
    assert runs == [0, 1, 0, 1]
    assert not any(answer.done() for answer in answers)
    stages[2].may_run.set()
    assert [result(answer, bundle) for answer in answers] == [3, 4]
    assert runs == [0, 1, 0, 1, 2, 2]
    executor.close()


def test_a_call_that_is_cancelled_ends_before_its_next_stage(bundle: Bundle, stages: list[Any]) -> None:
    runs: list[int] = []
    executor = LocalExecutor(bundle, stages, lambda number, seconds: runs.append(number))
    stages[2].may_run.clear()
    running, waiting = Future[None](), Future[None]()
    values = {bundle.inputs[0].name: torch.tensor(0.0)}
    answers = [executor.submit(dict(values), {}, options=CallOptions(cancellation=each)) for each in (running, waiting)]
    assert stages[2].has_begun.wait(WAIT_SECONDS)
    for signal in (running, waiting):
        signal.set_result(None)
    with pytest.raises(CancelledError):
        executor.submit(dict(values), {}, options=CallOptions(cancellation=waiting))
    stages[2].may_run.set()
    assert result(answers[0], bundle) == 3  # a stage that runs is not stopped
    with pytest.raises(CancelledError):
        answers[1].result(timeout=WAIT_SECONDS)
    assert result(submit(executor, bundle, 1), bundle) == 4
    assert runs == [0, 1, 0, 1, 2, 0, 1, 2]
    executor.close()


def test_calls_are_answered_when_the_thread_of_a_lane_has_ended(bundle: Bundle, stages: list[Any]) -> None:
    executor = LocalExecutor(bundle, stages, lambda number, seconds: None)
    answers = [submit(executor, bundle, number) for number in (-5, 0, 0)]
    with pytest.raises(StageLostError, match=r"the thread of lane 1 has ended: SystemExit: 3"):
        answers[0].result(timeout=WAIT_SECONDS)
    answers.append(submit(executor, bundle, 0))
    assert all(isinstance(answer.exception(timeout=WAIT_SECONDS), StageLostError) for answer in answers)
    assert executor.has_ended
    executor.close()


def test_the_threads_of_lanes_end(bundle: Bundle, stages: list[Any]) -> None:
    executor = LocalExecutor(bundle, stages, lambda number, seconds: None)
    [lane] = [thread for thread in threading.enumerate() if thread.name == "lane-1"]
    answer = submit(executor, bundle, 0)
    executor.close()
    assert result(answer, bundle) == 3
    lane.join(WAIT_SECONDS)
    assert not lane.is_alive()


def test_the_threads_of_an_executor_that_nobody_closes_end_after_its_calls(bundle: Bundle, stages: list[Any]) -> None:
    """A server that does not finish in time, and is given up."""
    executor = LocalExecutor(bundle, stages, lambda number, seconds: None)
    [lane] = [thread for thread in threading.enumerate() if thread.name == "lane-1"]
    stages[2].may_run.clear()
    answers = [submit(executor, bundle, number) for number in range(2)]
    del executor
    gc.collect()
    stages[2].may_run.set()
    assert [result(answer, bundle) for answer in answers] == [3, 4]
    lane.join(WAIT_SECONDS)
    assert not lane.is_alive()


def test_a_trace_has_the_calls_of_a_server_too(bundle: Bundle, stages: list[Any]) -> None:
    executor = LocalExecutor(bundle, stages)
    overlapping = executor.overlapping(lambda number, seconds: None)
    with executor.trace() as run_trace:
        result(submit(overlapping, bundle, 0), bundle)
        result(submit(executor, bundle, 0), bundle)
    compute = [(span.request, span.stage) for span in run_trace.spans if span.kind == "compute"]
    assert compute == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    overlapping.close()


class Counter(torch.nn.Module):
    """Counts its calls by operators that are slow enough for threads to take turns."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x @ x.new_ones(64, 64) / 64)
        return self.total.sum() / 4096


def test_executors_of_one_stage_take_turns_with_its_state(tmp_path: Path) -> None:
    pipeline = stagepack.load(stagepack.export(Counter(), (torch.ones(64, 64),), out=tmp_path / "counter.stagepack"))
    served, served_by_another_name = (pipeline.executor.overlapping(lambda _, __: None) for _ in range(2))

    [total_name] = value_names(pipeline.bundle.entry_point.signature.result)

    def count(executor: Executor) -> list[float]:
        sequence, counts = executor.begin_sequence(), []
        for _ in range(200):
            values = executor.submit({pipeline.inputs[0].name: torch.ones(64, 64)}, {}, sequence).result()
            counts.append(float(values[total_name]))
        return counts

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with torch.no_grad(), ThreadPoolExecutor(3) as pool:
            counts = list(pool.map(count, [pipeline.executor, served, served_by_another_name]))
    finally:
        sys.setswitchinterval(interval)
        served.close()
        served_by_another_name.close()
    assert counts == [[float(number) for number in range(1, 201)]] * 3
