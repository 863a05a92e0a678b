"""A process that is lost leaves its stages to the others: each call is answered rightly or fails with one typed error."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest
import torch

import stagepack
from stagepack.distributed import DistributedPipeline
from stagepack.errors import OptionError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.process_launcher import LocalLauncher
from stagepack_loaders.distributed.stage_process import ProcessDescription
from tests.distributed.bundles import has_restarts
from tests.distributed.forked_processes import ForkedProcesses, forked_launches
from tests.distributed.launchers import HOST, Node, launched, reasons
from tests.waiting import wait_until
from tools.fork_server import FORK_SERVER, ForkedProcess

_LAYERS = 8
_READY_SECONDS = 5.0
_LONGEST_DELAY = 0.2  # seconds


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("regrouping") / "m.stagepack"
    shapes = {"x": {0: torch.export.Dim("rows", min=1, max=64)}}
    return stagepack.export(Layers().eval(), (torch.ones(3, 16),), dynamic_shapes=shapes, out=out, stages="layers")


@pytest.fixture(autouse=True)
def forks() -> Iterator[None]:
    with forked_launches():
        yield


def kill(pipeline: DistributedPipeline, *numbers: int, may_restart: bool = True) -> None:
    """Kill the processes that run stages, and wait until the others are ready, or the pipeline has ended."""
    restart_count, kill_time = pipeline.restart_count, time.monotonic()
    for process_id in [pipeline.stage_facts[number].process_id for number in numbers]:
        os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: has_restarts(pipeline, restart_count + 1) if may_restart else pipeline.has_ended)
    assert time.monotonic() - kill_time < _READY_SECONDS


def stages_of(pipeline: DistributedPipeline) -> list[range]:
    return [part.stages for part in pipeline.placement.parts]


def test_stages_of_a_lost_process_go_to_the_others(bundle: Bundle) -> None:
    x = torch.randn(5, 16)
    expected = stagepack.load(bundle)(x)
    with stagepack.load(bundle, processes=3, max_restarts=3, on_loss="regroup") as pipeline:
        assert len(stages_of(pipeline)) == 3
        kill(pipeline, 1)
        assert stages_of(pipeline) == [range(4), range(4, 8)]
        assert torch.equal(pipeline(x), expected)
        assert {span.process for span in traced(pipeline, x)} <= {0, 1, 2}
        front = pipeline.executor.front
        kill(pipeline, 0)
        assert "which runs stages 0, 1, 2, 3, is lost" in str(front.lost)  # those of the bundle
        assert stages_of(pipeline) == [range(8)]
        kill(pipeline, 0)  # the last one starts again
        assert stages_of(pipeline) == [range(8)]
        assert torch.equal(pipeline(x), expected)


def test_stages_of_two_processes_that_are_lost_at_once_go_to_the_third(bundle: Bundle) -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "speeds": [1, 1, 4]}
    with stagepack.load(bundle, processes=3, max_restarts=1, on_loss="regroup", **options) as pipeline:
        kill(pipeline, 0, 1)
        assert stages_of(pipeline) == [range(8)]
        assert pipeline.placement.parts[0].device.speed == 4
        kill(pipeline, 0, may_restart=False)
        assert pipeline.restart_count == 1


@pytest.mark.parametrize("on_loss", ["restart", "regroup"])
def test_a_process_that_is_lost_while_it_loads_is_started_again(bundle: Bundle, on_loss: Any) -> None:
    x, first_ends = torch.randn(5, 16), iter([True])

    def launch(launcher: ForkedProcesses, description: ProcessDescription) -> Any:
        if next(first_ends, False):
            return ForkedProcess(FORK_SERVER.Process(target=os._exit, args=(7,), daemon=True))
        return ForkedProcesses._launch(launcher, description)

    with patch.object(LocalLauncher, "_launch", launch):
        with stagepack.load(bundle, processes=2, max_restarts=1, on_loss=on_loss) as pipeline:
            assert torch.equal(pipeline(x), stagepack.load(bundle)(x))
            assert (pipeline.restart_count, pipeline.lost) == (1, None)
            assert len(stages_of(pipeline)) == (2 if on_loss == "restart" else 1)
        first_ends = iter([True, True])
        with pytest.raises(StageLostError, match="was lost before it was ready: it ended with exit status 7"):
            stagepack.load(bundle, processes=1, max_restarts=1)


def traced(pipeline: DistributedPipeline, x: torch.Tensor) -> list[Any]:
    with pipeline.trace() as trace:
        pipeline(x)
    return list(trace.spans)


def test_what_is_said_of_the_lost_process_goes_with_it(bundle: Bundle) -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "memory": ["1GB", "6kB", "1GB"], "speeds": [1, 1, 4]}
    with stagepack.load(bundle, processes=3, max_restarts=3, on_loss="regroup", **options) as pipeline:
        before = stages_of(pipeline)
        assert len(before[1]) < len(before[2])
        kill(pipeline, 0)
        after = stages_of(pipeline)
        assert len(after) == len(pipeline.bundle.stages) == 2
        assert pipeline.placement.parts[1].device.speed == 4
        assert "2 stages, ready" in repr(pipeline)
        assert len(after[0]) < len(after[1])  # the one with little memory is left, and the fast one


def test_without_the_option_the_same_processes_start_again(bundle: Bundle) -> None:
    with stagepack.load(bundle, processes=2, max_restarts=1) as pipeline:
        kill(pipeline, 1)
        assert len(stages_of(pipeline)) == 2


def test_the_same_processes_start_again_where_the_others_have_too_little_memory(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with stagepack.load(bundle, processes=2, max_restarts=2, on_loss="regroup", memory=["6kB", "6kB"]) as pipeline:
        kill(pipeline, 0)
        assert len(stages_of(pipeline)) == 2
    assert "the same processes start again: memory: no placement fits" in caplog.text


@pytest.mark.parametrize(
    ("flags", "placed"),
    [
        (["--device", "auto"], "stages 0 to 3 on {host}/cpu, stages 4 to 7 on {host}/cpu;"),
        (["--placement", "3,5"], "stages 0 to 2 on {host}/cpu, stages 3 to 7 on {host}/cpu;"),
        (["--placement", "0,8"], "stages 0 to 7 on {host}/cpu;"),
        (["--memory", "1GB", "--memory", "6kB"], "stages 0 to"),
    ],
    ids=str,
)
def test_processes_of_a_launcher_run_what_is_placed_on_them(bundle: Bundle, flags: list[str], placed: str) -> None:
    with launched([Node(arguments=["load", bundle.path, *flags])] * 2) as processes:
        assert [started.process.wait(timeout=60) for started in processes] == [0, 0], processes[0].output
        output = processes[0].output
    assert f"placed: {placed.format(host=HOST)}" in output
    assert "largest difference 0\n" in output


def test_processes_of_a_launcher_that_place_otherwise_are_refused(bundle: Bundle) -> None:
    nodes = [Node(arguments=["load", bundle.path, "--placement", counts]) for counts in ("3,5", "5,3")]
    with launched(nodes) as processes:
        for line in reasons(processes):
            assert f"expected one placement of the stages in all processes: rank 0 on {HOST} has 3,5" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 2, "on_loss": "ignore"}, "on_loss: expected 'restart' or 'regroup'"),
        ({"on_loss": "regroup"}, "on_loss: only stages in processes"),
        ({"processes": 2, "on_loss": "regroup"}, "expected max_restarts of at least 1, found 0"),
    ],
    ids=str,
)
def test_other_words_are_refused(bundle: Bundle, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stagepack.load(bundle, **options)


@pytest.mark.slow
def test_under_load_each_call_is_answered_rightly_or_fails_with_one_typed_error(bundle: Bundle) -> None:
    """25 pipelines of three processes, each of which loses two of them at drawn moments."""
    draw = random.Random(59)  # noqa: S311 - the same moments in each run
    one = stagepack.load(bundle)
    calls = [torch.randn(1 + rows, 16) for rows in range(8)]
    expected = [one(x) for x in calls]
    answered = lost = 0
    for _ in range(25):
        with stagepack.load(bundle, processes=3, max_restarts=3, on_loss="regroup") as pipeline:
            requests: list[tuple[int, Future[torch.Tensor]]] = []
            is_over = threading.Event()

            def send(
                pipeline: DistributedPipeline,
                requests: list[tuple[int, "Future[torch.Tensor]"]],
                is_over: threading.Event,
            ) -> None:
                for number in itertools.count():
                    if is_over.is_set():
                        return
                    try:
                        requests.append((number % 8, pipeline.submit(calls[number % 8])))
                    except StageLostError:
                        time.sleep(0.01)

            sender = threading.Thread(target=send, args=(pipeline, requests, is_over))
            sender.start()
            for _ in range(2):
                time.sleep(draw.random() * _LONGEST_DELAY)
                kill(pipeline, draw.randrange(len(pipeline.stage_facts)))
            time.sleep(draw.random() * _LONGEST_DELAY)
            is_over.set()
            sender.join()
            assert len(stages_of(pipeline)) == 1
            for number, request in requests:
                try:
                    assert torch.equal(request.result(timeout=10), expected[number])
                    answered += 1
                except StageLostError:
                    lost += 1
    print(f"{answered} calls were answered, {lost} failed")  # noqa: T201 - shown by pytest -rP
    assert answered > lost > 0
