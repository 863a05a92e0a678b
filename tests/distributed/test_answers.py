"""Stages in processes of their own answer as in one process, bit for bit."""

import os
import random
import subprocess
import time
from collections import Counter
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy
import pytest
import torch

import stagepack
from stagepack.errors import InputError, OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.executor import CallOptions
from tests.distributed.bundles import in_processes, process_ids
from tests.distributed.forked_processes import forked_launches
from tests.distributed.launchers import TORCHRUN
from tests.distributed.operators import Waiting, waiting_module
from tests.modules import module_of
from tests.roundtrip.test_shared_inputs import WritesFirst
from tests.waiting import wait_until
from tools.fork_server import run_forked


def test_sixteen_requests_of_changing_sizes_are_in_flight(layers: Bundle) -> None:
    one = stagepack.load(layers)
    calls = [torch.randint(10, (1 + 97 * number % 50,)) for number in range(200)]
    with in_processes(layers, in_flight=16) as pipeline:
        results = [answer.result() for answer in [pipeline.submit(ids) for ids in calls]]
    assert all(torch.equal(result, one(ids)) for result, ids in zip(results, calls, strict=True))


def test_callbacks_may_submit_the_next_requests(layers: Bundle) -> None:
    ids = torch.arange(4096) % 10  # of 16 requests, more than the socket to a process holds
    expected = stagepack.load(layers)(ids)
    results: list[torch.Tensor] = []
    with in_processes(layers, 1) as pipeline:

        def submit_next(answer: "Future[torch.Tensor]") -> None:
            results.append(answer.result())
            if len(results) <= 200:
                pipeline.submit(ids).add_done_callback(submit_next)

        for _ in range(16):
            pipeline.submit(ids).add_done_callback(submit_next)
        wait_until(lambda: len(results) == 216)
    assert all(torch.equal(result, expected) for result in results)


def shared_files(process_id: int) -> set[str]:
    """The files of memory that a process shares with others."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:stagepack" in line}


def test_a_slow_process_holds_up_the_one_before_it(tmp_path: Path) -> None:
    seconds = torch.full((70_000,), 0.1)  # more than goes without shared memory
    bundle = stagepack.export(Waiting(), (seconds,), out=tmp_path / "waiting.stagepack", split_at=["wait"])
    with in_processes(bundle, imports=[Waiting.__module__]) as pipeline:
        first_process = process_ids(pipeline)[1]
        calls = [pipeline.submit(seconds) for _ in range(16)]
        block_counts = []
        while not all(call.done() for call in calls):
            block_counts.append(len(shared_files(first_process) - shared_files(os.getpid())))
            time.sleep(0.02)
        assert all(torch.equal(call.result(), seconds * 2) for call in calls)
    assert 2 <= max(block_counts) <= 6


def test_stages_do_not_run_calls_that_nobody_waits_for(tmp_path: Path) -> None:
    model = torch.nn.Sequential(waiting_module(), waiting_module())
    bundle = stagepack.export(model, (torch.zeros(2),), out=tmp_path / "waiting.stagepack", stages=2)
    [input_name] = [edge.name for edge in bundle.inputs]
    with in_processes(bundle, imports=[Waiting.__module__]) as pipeline:

        def runs() -> list[int]:
            statuses = sorted(pipeline.executor.process_statuses().items())
            return [stage.runs for _, status in statuses for stage in status.stages]

        wait_until(lambda: runs() == [1, 1])  # the recorded example
        cancellation = Future[None]()
        options = CallOptions(cancellation=cancellation)
        calls = [pipeline.executor.submit({input_name: torch.full((2,), 1.0)}, {}, options=options) for _ in range(6)]
        time.sleep(0.1)
        cancellation.set_result(None)
        start = time.monotonic()
        assert torch.equal(pipeline(torch.full((2,), 0.01)), torch.full((2,), 0.04))
        assert time.monotonic() - start < 2  # of 9 s
        for call in calls:
            with pytest.raises(CancelledError):
                call.result()
        wait_until(lambda: min(runs()) == 2)  # the example, and the last call
        assert runs() in ([3, 2], [2, 2])  # the first call may have begun


def test_cancelled_calls_leave_those_beside_them_and_nothing_else(layers: Bundle) -> None:
    one, [input_name] = stagepack.load(layers), [edge.name for edge in layers.inputs]
    [result_name] = [edge.name for edge in layers.edges if edge.producer == 2]
    [symbol] = layers.entry_point.symbols
    outcomes = Counter[str]()

    def ask(pipeline: DistributedPipeline, seed: int) -> None:
        drawn = random.Random(seed)  # noqa: S311 - of a test
        for _ in range(150):
            ids = torch.randint(10, (drawn.choice((1, 5, 50, 4000)),))
            cancellation = Future[None]()
            options = CallOptions(cancellation=cancellation)
            answer = pipeline.executor.submit({input_name: ids}, {symbol.name: len(ids)}, options=options)
            if is_cancelled := drawn.random() < 0.5:
                time.sleep(drawn.choice((0, 0.0001, 0.001, 0.003)))
                cancellation.set_result(None)
            try:
                assert torch.equal(answer.result(60)[result_name], one(ids))
                outcomes["answered"] += 1
            except CancelledError:
                assert is_cancelled
                outcomes["cancelled"] += 1

    with in_processes(layers) as pipeline, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: ask(pipeline, seed), range(8)))
        pipeline(torch.arange(5))
        front = pipeline.executor.front
        assert not front._sent_messages._messages
        assert not front._worker._cancelled_numbers
    assert min(outcomes["answered"], outcomes["cancelled"]) > 100


@pytest.mark.parametrize("is_writeable", [True, False])
def test_what_is_written_into_arrays_is_what_one_process_writes(tmp_path: Path, is_writeable: bool) -> None:
    adding = module_of(lambda self, x: x.add_(1) * 2)
    bundle = stagepack.export(adding, (torch.zeros(4, dtype=torch.bfloat16),), out=tmp_path / "adding.stagepack")
    inputs = [numpy.zeros(4, ml_dtypes.bfloat16) for _ in range(2)]
    for array in inputs:
        array.flags.writeable = is_writeable
    expected = stagepack.load(bundle)(inputs[0])
    with in_processes(bundle) as pipeline:
        result = pipeline(inputs[1])
    assert isinstance(result, numpy.ndarray)
    assert numpy.array_equal(result, expected)
    assert numpy.array_equal(inputs[0], inputs[1])
    assert (inputs[0] == 1).all() == is_writeable


def test_fewer_processes_than_stages_share_them(layers: Bundle) -> None:
    with in_processes(layers, 2) as pipeline:
        assert sorted({facts.rank for facts in pipeline.stage_facts}) == [1, 2]
        assert torch.equal(pipeline(torch.arange(3)), stagepack.load(layers)(torch.arange(3)))


def test_numpy_arrays_are_answered_with_numpy_arrays(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        result = pipeline(torch.arange(3).numpy())
    assert torch.equal(torch.from_numpy(result), stagepack.load(layers)(torch.arange(3)))


def test_each_sequence_has_state_of_its_own(counting: Bundle) -> None:
    x = torch.arange(4.0)
    one = stagepack.load(counting)
    expected = [[part.clone() for part in one(x * factor)] for factor in (1, 2, 3)]
    with in_processes(counting) as pipeline:
        with pipeline.sequence() as first, pipeline.sequence() as second:
            for factor, parts in zip((1, 2, 3), expected, strict=True):
                for sequence in (first, second):
                    assert all(torch.equal(a, b) for a, b in zip(sequence(x * factor), parts, strict=True))
        assert torch.equal(pipeline(x)[1], torch.ones(4))
        assert torch.equal(pipeline(x)[1], torch.full((4,), 2.0))
        pipeline.reset_state()
        assert torch.equal(pipeline(x)[1], torch.ones(4))
        with pytest.raises(OptionError, match="the sequence is closed"):
            first(x)


def test_results_of_requests_in_flight_are_not_views_of_state(counting: Bundle) -> None:
    x = torch.arange(4.0)
    with in_processes(counting) as pipeline:
        counts = [answer.result()[1] for answer in [pipeline.submit(x) for _ in range(20)]]
    assert [int(count[0]) for count in counts] == list(range(1, 21))


def test_large_batches_go_in_parts(layers: Bundle) -> None:
    one = stagepack.load(layers)
    with forked_launches(), stagepack.load(layers, processes=True, microbatch_size=4) as pipeline:
        for rows in (1, 4, 5, 10):
            ids = torch.arange(rows) % 7
            torch.testing.assert_close(pipeline(ids), one(ids))
        with pytest.raises(InputError):
            pipeline(torch.arange(11))  # the last part has a number beyond the table
        with pipeline.trace() as trace:
            pipeline(torch.zeros(10, dtype=torch.int64))
    assert len({span.request for span in trace.spans if span.kind == "compute"}) == 3


def test_batches_whose_rows_depend_on_each_other_are_not_cut(counting: Bundle) -> None:
    with forked_launches(), pytest.raises(OptionError, match="cannot be cut: the model keeps state between calls"):
        stagepack.load(counting, processes=True, microbatch_size=2)


def test_each_process_opens_its_own_files_alone(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        for facts in pipeline.stage_facts:
            assert facts.files == (layers.stages[facts.stage].graph, *layers.stages[facts.stage].weights)
            assert facts.bytes_read == sum(layers.files[name].size for name in facts.files)
            maps = Path(f"/proc/{process_ids(pipeline)[facts.rank]}/maps").read_text()
            mapped = {Path(line.split()[-1]).name for line in maps.splitlines() if str(layers.path) in line}
            assert mapped <= set(facts.files)


def run_torchrun(processes: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_forked("--standalone", "--nproc-per-node", str(processes), *arguments, script=TORCHRUN)


def test_torchrun_runs_the_command_over_processes(layers: Bundle) -> None:
    finished = run_torchrun(2, "-m", "stagepack", "load", str(layers.path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("largest difference 0\n") == 1
    assert all(f"stage-{number}.safetensors" in finished.stdout for number in range(3))


@pytest.mark.slow
def test_torchrun_with_more_processes_than_stages_is_refused(layers: Bundle) -> None:
    finished = run_torchrun(4, "-m", "stagepack", "load", str(layers.path))
    assert finished.returncode != 0
    assert "expected 1 to 3 processes for 3 stages, found 4" in finished.stderr


def test_connect_under_torchrun(layers: Bundle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, torch, stagepack\n"
        "from stagepack.distributed import connect\n"
        "for _ in range(2):\n"
        "    pipeline = connect(sys.argv[1])\n"
        "    if pipeline is not None:\n"
        "        with pipeline:\n"
        "            answers = [pipeline.submit(torch.arange(n)) for n in range(1, 9)]\n"
        "            one = stagepack.load(sys.argv[1])\n"
        "            assert all(torch.equal(a.result(), one(torch.arange(n))) for n, a in enumerate(answers, 1))\n"
        "            print('equal')\n"
        "    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN\n"
    )
    finished = run_torchrun(2, str(script), str(layers.path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "equal\nequal\n"


def test_what_was_sent_is_freed(layers: Bundle) -> None:
    ids = torch.zeros(4096, dtype=torch.int64)  # 256 kB cross from stage to stage
    with in_processes(layers) as pipeline:

        def resident_bytes() -> int:
            texts = [Path(f"/proc/{number}/statm").read_text() for number in ("self", *process_ids(pipeline).values())]
            return sum(int(text.split()[1]) for text in texts) * os.sysconf("SC_PAGE_SIZE")

        for _ in range(40):
            pipeline(ids)
        before = resident_bytes()
        for _ in range(400):
            pipeline(ids)
        assert resident_bytes() - before < 60e6  # of 300 MB that were sent


def test_inputs_on_the_memory_of_a_written_one_are_refused(tmp_path: Path) -> None:
    example = (torch.ones(2, 4), torch.ones(2, 4))
    bundle = stagepack.export(WritesFirst().eval(), example, out=tmp_path / "m.stagepack", stages=2)
    memory = torch.rand(4, 4)
    with in_processes(bundle) as pipeline:
        with pytest.raises(InputError, match="x and y share memory, and the model writes x: give copies"):
            pipeline(memory[:2], memory[1:3])
        assert pipeline(memory[:2], memory[2:]).shape == (2, 4)
