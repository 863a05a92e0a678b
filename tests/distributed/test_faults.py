"""A process that is lost, stopped, late or wrong: typed errors within seconds, nothing hangs, nothing is left behind."""

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import stagepack
from stagepack.errors import DigestError, GroupError, InputError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed import process_executor
from stagepack_loaders.distributed.meeting import Seat
from stagepack_loaders.distributed.membership import LoadReport
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.distributed.stage_process import DEVICE_LOST_STATUS, ProcessDescription
from stagepack_loaders.options import ProcessOptions
from tests.distributed.bundles import assert_gone, has_restarts, in_processes, process_ids
from tests.distributed.forked_processes import ForkedProcesses
from tests.distributed.operators import Losing, Waiting
from tests.waiting import wait_until

IDS = torch.arange(6)


def lost_error(pipeline: DistributedPipeline, *, within: float = 60.0) -> StageLostError:
    """The error of the first call that fails; calls must end in time."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            pipeline.submit(IDS).result(timeout=max(0.1, end - time.monotonic()))
        except StageLostError as error:
            return error
    raise AssertionError(f"no call failed within {within} s")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_killed_process_is_told_with_its_signal(rank: int, layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        numbers = process_ids(pipeline)
        pipeline(IDS)
        os.kill(numbers[rank], signal.SIGKILL)
        error = lost_error(pipeline)
        assert (error.stages, error.exit_status) == ((rank - 1,), -signal.SIGKILL)
        assert f"which runs stage {rank - 1}, is lost: it ended with signal 9" in str(error)
        with pytest.raises(StageLostError):
            pipeline(IDS)
    assert_gone(numbers)


def test_a_stopped_process_is_told_by_its_silence(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        numbers = process_ids(pipeline)
        os.kill(numbers[2], signal.SIGSTOP)
        answer = pipeline.submit(IDS)
        with pytest.raises(StageLostError, match=r"runs stage 1, is lost: it has sent no heartbeat for") as caught:
            answer.result(timeout=60)
        assert caught.value.stages == (1,)
    assert_gone(numbers)


class WithoutStatuses(ForkedProcesses):
    """Does not know how its processes end, as on other hosts."""

    def _find_end(self, process: Any) -> None:
        return None


@pytest.mark.slow
def test_the_first_of_several_lost_processes_is_named(layers: Bundle) -> None:
    rounds = 6
    with in_processes(layers, launcher=WithoutStatuses, max_restarts=rounds) as pipeline:
        for number in range(rounds):
            rank = number % 3 + 1
            os.kill(process_ids(pipeline)[rank], signal.SIGKILL)
            assert lost_error(pipeline).stages == (rank - 1,)
            wait_until(partial(has_restarts, pipeline, number + 1))


def test_a_process_whose_device_is_lost_is_started_again(tmp_path: Path) -> None:
    bundle = stagepack.export(Losing(), (torch.ones(3),), out=tmp_path / "losing.stagepack", split_at=["second"])
    with in_processes(bundle, imports=[Losing.__module__], max_restarts=1) as pipeline:
        assert torch.equal(pipeline(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(StageLostError) as caught:
            pipeline(-torch.ones(3))
        assert caught.value.stages == (0,)
        assert caught.value.exit_status == DEVICE_LOST_STATUS
        wait_until(partial(has_restarts, pipeline, 1))
        assert torch.equal(pipeline(torch.ones(3)), torch.full((3,), 2.0))


class FailsOnce(ForkedProcesses):
    """The second start fails."""

    starts = 0

    def start(self, report_loss: Callable[[StageLostError], None], check: Callable[[], None]) -> Any:
        self.starts += 1
        if self.starts == 2:
            raise OSError("no process can be started")
        return super().start(report_loss, check)


def test_a_start_that_fails_is_tried_again(layers: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stagepack")
    with in_processes(layers, launcher=FailsOnce, max_restarts=2) as pipeline:
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(partial(has_restarts, pipeline, 1))
        assert torch.equal(pipeline(IDS), stagepack.load(layers)(IDS))
        assert not pipeline.has_ended
    first, second, ready = [record.getMessage() for record in caplog.records if record.name == "stagepack"]
    assert re.fullmatch(r".*layers.stagepack': process 1 .* signal 9; all processes are started again", first)
    assert "could not be started again: no process can be started; all processes are started again" in second
    assert re.fullmatch(r".*layers.stagepack': all processes are ready again, after .* s", ready)
    with in_processes(layers, launcher=FailsOnce, max_restarts=1) as pipeline:
        numbers = process_ids(pipeline)
        os.kill(numbers[1], signal.SIGKILL)
        wait_until(lambda: pipeline.has_ended)
        with pytest.raises(StageLostError, match="could not be started again: no process can be started"):
            pipeline(IDS)
    assert_gone(numbers)


def test_restarts_before_the_window_do_not_count(layers: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_executor, "_RESTART_WINDOW_SECONDS", 3600.0)
    with in_processes(layers, max_restarts=1) as pipeline:
        for restart_count in (1, 2):
            os.kill(process_ids(pipeline)[1], signal.SIGKILL)
            wait_until(partial(has_restarts, pipeline, restart_count))
            monkeypatch.setattr(process_executor, "_RESTART_WINDOW_SECONDS", 0.0)
        monkeypatch.setattr(process_executor, "_RESTART_WINDOW_SECONDS", 3600.0)
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(lambda: pipeline.has_ended)


def test_state_that_was_lost_is_not_used_by_mistake(counting: Bundle) -> None:
    x = torch.arange(4.0)
    with in_processes(counting, max_restarts=1) as pipeline:
        sequence = pipeline.sequence()
        sequence(x)
        pipeline(x)
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(lambda: pipeline.restart_count == 1)
        with pytest.raises(StageLostError, match="call reset_state"):
            pipeline(x)
        with pytest.raises(StageLostError, match="begin another one"):
            sequence(x)
        sequence.close()
        pipeline.reset_state()
        assert torch.equal(pipeline(x)[1], torch.ones(4))
        with pipeline.sequence() as another:
            assert torch.equal(another(x)[1], torch.ones(4))


def test_an_error_of_a_stage_fails_its_call_alone(layers: Bundle) -> None:
    one = stagepack.load(layers)
    with pytest.raises(InputError) as expected:
        one(torch.tensor([3, 11]))
    with in_processes(layers) as pipeline:
        for _ in range(3):
            answers = [pipeline.submit(torch.tensor([3, 11]) if number % 3 else IDS) for number in range(12)]
            for number, answer in enumerate(answers):
                if number % 3:
                    with pytest.raises(InputError) as caught:
                        answer.result()
                    assert str(caught.value) == str(expected.value)
                    assert caught.value.__notes__[0].startswith(
                        f"stage 0 runs in process {pipeline.stage_facts[0].rank} on "
                    )
                else:
                    assert torch.equal(answer.result(), one(IDS))


class SecondHasAnother(ForkedProcesses):
    """The second process opens another folder."""

    def _describe(self, rank: int, store: Any) -> ProcessDescription:
        description = super()._describe(rank, store)
        other = Path(description.bundle).with_name("other.stagepack")
        return msgspec.structs.replace(description, bundle=str(other)) if rank == 2 else description


def test_a_changed_byte_in_the_files_of_one_process_is_told(layers: Bundle) -> None:
    other = layers.path.with_name("other.stagepack")
    shutil.copytree(layers.path, other, dirs_exist_ok=True)
    weights = other / layers.stages[1].weights[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    with pytest.raises(DigestError, match=weights.name), in_processes(layers, launcher=SecondHasAnother):
        pass


def test_another_bundle_in_one_process_is_told(layers: Bundle) -> None:
    other = layers.path.with_name("other.stagepack")
    shutil.rmtree(other, ignore_errors=True)
    stagepack.recut(layers, out=other, stages=2)
    with (
        pytest.raises(GroupError, match=r"expected one bundle, by the digest .* rank 0 on .* has .*, rank 2 on"),
        in_processes(layers, launcher=SecondHasAnother),
    ):
        pass


def test_a_report_that_comes_before_its_process_ends_is_read() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # public, and not in its type hints
    report = LoadReport()

    def check(reports: Mapping[int, LoadReport]) -> None:
        if len(reports) == 1:
            store.set("load/1", msgspec.json.encode(report).decode())
        raise StageLostError("process 1 has ended")

    assert Seat(store, 0, 2).exchange_reports("load", report, seconds=20, check=check) == [report, report]
    with pytest.raises(StageLostError, match="process 1 has ended"):
        Seat(store, 0, 3).exchange_reports("other", report, seconds=20, check=check)


class WithoutThird(ForkedProcesses):
    """The third process never comes."""

    def _launch(self, description: ProcessDescription) -> Any:
        if description.rank == 3:
            processes = ProcessOptions(imports=["tests.distributed.never_ready"])
            options = msgspec.structs.replace(description.options, processes=processes)
            description = msgspec.structs.replace(description, options=options)
        return super()._launch(description)


def test_a_process_that_does_not_come_is_named(layers: Bundle) -> None:
    with (
        pytest.raises(GroupError, match=r"expected 4 processes, after 3 s there is no identity of rank 3"),
        in_processes(layers, launcher=WithoutThird, start_seconds=3),
    ):
        pass


def test_a_process_that_ends_before_it_is_ready_is_told(layers: Bundle) -> None:
    with pytest.raises(StageLostError, match="was lost before it was ready: it ended with exit status 7") as caught:
        stagepack.load(layers, processes=1, imports=["tests.distributed.ends_early"])
    assert caught.value.exit_status == 7


def test_a_stage_that_hangs_is_found(tmp_path: Path) -> None:
    bundle = stagepack.export(Waiting(), (torch.zeros(3),), out=tmp_path / "waiting.stagepack", split_at=["second"])
    imports = [Waiting.__module__]
    with in_processes(bundle, imports=imports, max_restarts=1, stall_seconds=1.5) as pipeline:
        hanging_process = process_ids(pipeline)[1]
        answers = [pipeline.submit(torch.full((3,), 0.4)) for _ in range(5)]  # longer than the limit, but each in time
        assert all(torch.equal(answer.result(), torch.full((3,), 0.8)) for answer in answers)
        started = time.monotonic()
        says = r"process 1 on .*, which runs stage 0, is lost: no call was answered"
        with pytest.raises(StageLostError, match=says) as caught:
            pipeline(torch.full((3,), 60.0))
        assert time.monotonic() - started < 30
        assert caught.value.stages == (0,)
        wait_until(partial(has_restarts, pipeline, 1))
        assert torch.equal(pipeline(torch.zeros(3)), torch.zeros(3))
    assert_gone({1: hanging_process})


def test_closing_answers_what_is_in_flight(layers: Bundle) -> None:
    with in_processes(layers, in_flight=32) as pipeline:
        numbers = process_ids(pipeline)
        assert "ready" in repr(pipeline)
        answers = [pipeline.submit(IDS) for _ in range(32)]
    expected = stagepack.load(layers)(IDS)
    assert all(torch.equal(answer.result(timeout=0), expected) for answer in answers)
    with pytest.raises(StageLostError, match="the pipeline is closed"):
        pipeline(IDS)
    assert_gone(numbers)
    pipeline.close()


def test_an_input_that_does_not_fit_or_cannot_be_sent_fails_its_call_alone(layers: Bundle) -> None:
    expected = stagepack.load(layers)(IDS)
    with in_processes(layers) as pipeline:
        with pytest.raises(InputError, match="ids: expected dtype int64"):
            pipeline(torch.ones(3))
        with pytest.raises(InputError, match=r"expected a dense tensor with data, found torch\.sparse_coo"):
            pipeline(IDS.to_sparse())
        assert torch.equal(pipeline(IDS), expected)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_stopped_process(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        numbers = process_ids(pipeline)
        os.kill(numbers[3], signal.SIGSTOP)
        answer = pipeline.submit(IDS)
        start_time = time.monotonic()
    assert time.monotonic() - start_time < 7
    with pytest.raises(StageLostError):
        answer.result(timeout=0)
    assert_gone(numbers)
