"""Values that go from device to device of two processes: over gloo on the CPU, as NCCL copies them between GPUs."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.distributed import DistributedPipeline
from stagepack.errors import OptionError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed import routes
from stagepack_loaders.distributed.device_groups import device_port, mark_device_routes
from stagepack_loaders.distributed.meeting import StageFacts
from stagepack_loaders.distributed.routes import ConnectionLostError, Route
from tests.distributed import bundles
from tests.distributed.bundles import assert_gone, check_case, in_processes, process_ids, tree_environment
from tests.distributed.connections import gloo_channels
from tests.distributed.launchers import Node, free_port, launched, load, reasons
from tests.distributed.test_drawn_updates import Load, drawn_update, versions
from tests.distributed.test_models import DRAWING, QUICK, run_param
from tests.distributed.test_random_kills import Kills
from tests.zoo.case import Case
from tests.zoo.cases import CASES

__all__ = ["versions"]  # a fixture
IMPORTED = "tests.distributed.gloo_devices"
ON = {"STAGEPACK_NCCL": "gloo"}


@pytest.fixture(autouse=True)
def without_inline_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of messages that the processes have, too."""
    monkeypatch.setattr(routes, "_INLINE_BYTES", 0)


@contextmanager
def joined_by_devices(bundle: Bundle, **options: Any) -> Iterator[DistributedPipeline]:
    """A bundle in processes whose values go from device to device."""
    imports = [*options.pop("imports", ()), IMPORTED]
    with in_processes(bundle, imports=imports, **options) as pipeline:
        ports = [facts.port for facts in pipeline.stage_facts]
        assert all(port.startswith("gloo ") for port in ports)
        assert len(set(ports)) == len({facts.rank for facts in pipeline.stage_facts})
        yield pipeline


def check_by_devices(check: Callable[..., None], bundle: Bundle, calls: Sequence[Inputs], **options: Any) -> None:
    imports = [*options.pop("imports", ()), IMPORTED]
    check(bundle, calls, imports=imports, **options)


@pytest.mark.parametrize("check", [bundles.check_in_turn, bundles.check_in_flight])
@pytest.mark.parametrize(
    ("case", "processes"),
    [
        run_param(case, 2 + number % 3, is_quick=case in QUICK)
        for number, case in enumerate(case for case in CASES if case.name not in DRAWING)
    ],
)
def test_models_answer_as_in_one_process(
    case: Case, processes: int, check: Callable[..., None], tmp_path: Path
) -> None:
    if check is bundles.check_in_flight and case.name.startswith(("aliasing", "state")):
        pytest.skip("calls in flight write what others read")
    check_case(case, tmp_path, processes, [None, 3, None, 3], partial(check_by_devices, check))


@pytest.mark.parametrize(("seed", "rounds"), [(0, 5), pytest.param(1, 50, marks=pytest.mark.slow)])
def test_processes_killed_at_random_moments_are_started_again(seed: int, rounds: int, layers: Bundle) -> None:
    kills = Kills(layers, seed)
    with joined_by_devices(layers, max_restarts=rounds) as pipeline:
        for _ in range(rounds):
            print(f"seed {seed}, {kills.run_round(pipeline)}")  # noqa: T201 - shown if the test fails
        numbers = process_ids(pipeline)
    assert_gone(numbers)


@pytest.mark.parametrize("end", [0, 1])
def test_what_waits_for_a_channel_that_is_aborted_ends(end: int) -> None:
    channels, errors = gloo_channels(), list[str]()

    def receive() -> None:
        try:
            channels[1].receive([1 << 20])
        except ConnectionLostError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=receive)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    channels[end].abort()
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(errors) == 1
    with pytest.raises(ConnectionLostError):
        channels[end].send([torch.zeros(1)])
    channels[end].close()
    channels[end].abort()  # of a closed one: nothing


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_process_that_is_stopped_is_told_by_its_silence(rank: int, layers: Bundle) -> None:
    ids = torch.arange(4096) % 10  # 256 KB from stage to stage
    with joined_by_devices(layers) as pipeline:
        numbers = process_ids(pipeline)
        pipeline(ids)
        os.kill(numbers[rank], signal.SIGSTOP)
        calls = [pipeline.submit(ids) for _ in range(12)]
        for call in calls:
            with pytest.raises(StageLostError, match="it has sent no heartbeat for") as caught:
                call.result(timeout=30)
            assert caught.value.stages == (rank - 1,)
    assert_gone(numbers)


@pytest.mark.parametrize(("seed", "count"), [(3, 6), pytest.param(1, 40, marks=pytest.mark.slow)])
def test_drawn_updates_with_kills(seed: int, count: int, versions: dict[str, Bundle]) -> None:
    draw, results = random.Random(seed), []  # noqa: S311 - the same moments in each run
    with joined_by_devices(versions["step 0"], max_restarts=count) as pipeline:
        pipeline.update(versions["step 0"], version="step 0")
        load_of_calls = Load(pipeline, versions)
        with load_of_calls.running():
            results = [drawn_update(pipeline, load_of_calls, versions, draw) for _ in range(count)]
        assert "updated" in results
        assert load_of_calls.counts["sequences"]


def test_sequences_keep_their_state(counting: Bundle) -> None:
    one, x = stagepack.load(counting), torch.ones(4)
    with torch.no_grad(), joined_by_devices(counting) as pipeline, pipeline.sequence() as sequence:
        answers = [
            pipeline.submit(x) for _ in range(6)
        ]  # the buffers are written while earlier values are on their way
        for answer in answers:
            assert all(map(torch.equal, answer.result(), one(x)))
        with one.sequence() as own_sequence:
            for _ in range(3):
                assert all(map(torch.equal, sequence(x), own_sequence(x)))
        pipeline.reset_state()
        one.reset_state()
        assert all(map(torch.equal, pipeline(x), one(x)))


def test_calls_of_two_clients_with_failures_between_them(layers: Bundle) -> None:
    one, faults = stagepack.load(layers), list[str]()
    with torch.no_grad(), joined_by_devices(layers) as pipeline:

        def call(seed: int) -> None:
            draw = random.Random(seed)  # noqa: S311 - the same calls in each run
            for _ in range(60):
                ids = torch.arange(draw.choice([1, 5, 1024, 4096])) % 10
                if draw.random() < 0.2:
                    ids[-1] = 99
                    if not isinstance(pipeline.submit(ids).exception(timeout=60), stagepack.errors.StagepackError):
                        faults.append("no error")
                elif not torch.equal(pipeline.submit(ids).result(timeout=60), expected[len(ids)]):
                    faults.append(f"another answer to {len(ids)} ids")

        expected = {count: one(torch.arange(count) % 10) for count in (1, 5, 1024, 4096)}
        clients = [threading.Thread(target=call, args=(seed,)) for seed in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(100)
            assert not client.is_alive()
    assert faults == []


def wide_bundle(folder: Path) -> Bundle:
    """A model whose stages pass 4 MB on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64)).eval()
    return stagepack.export(model, (torch.randn(1024, 64),), out=folder / "wide.stagepack", split_at=["1"])


def test_a_front_with_stages_takes_part(tmp_path: Path) -> None:
    bundle = wide_bundle(tmp_path)
    nodes = [Node(arguments=load(bundle).arguments, environment=ON) for _ in range(2)]
    with launched(nodes) as processes:
        for started in processes:
            assert started.process.wait(timeout=100) == 0, started.output
        assert "ran the example: 1 output, largest difference 0" in processes[0].output


_LOSING_SCRIPT = """
import os, sys, threading, time, torch
import stagepack.distributed
from stagepack.errors import StageLostError

pipeline = stagepack.distributed.connect(sys.argv[1])
if pipeline is not None:
    assert all(facts.port.startswith("gloo ") for facts in pipeline.stage_facts)
    x = torch.randn(1024, 64)
    pipeline(x)
    os.kill(pipeline.stage_facts[1].process_id, int(sys.argv[2]))
    start = time.monotonic()
    calls = [pipeline.submit(x) for _ in range(12)]  # more than the buffers of a socket hold
    for call in calls:
        assert isinstance(call.exception(timeout=30), StageLostError)
    print(f"lost after {time.monotonic() - start:.1f} s")
    pipeline.close()
    assert "stages" not in [thread.name for thread in threading.enumerate()]
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_with_stages_outlives_a_process_that_is_lost(end: signal.Signals, tmp_path: Path) -> None:
    bundle = wide_bundle(tmp_path)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOSING_SCRIPT, str(bundle.path), str(int(end))],
            env=tree_environment() | group | ON | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = nodes[0].communicate(timeout=100)
        assert nodes[0].returncode == 0, output
        assert float(output.split("lost after ")[1].split()[0]) < 10
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_processes_that_differ_go_by_the_host(tmp_path: Path) -> None:
    bundle = wide_bundle(tmp_path)
    nodes = [Node(arguments=load(bundle).arguments, environment=ON if rank else {}) for rank in range(2)]
    with launched(nodes) as processes:
        for started in processes:
            assert started.process.wait(timeout=100) == 0, started.output


def test_an_unknown_setting_is_refused_by_all(tmp_path: Path) -> None:
    bundle = wide_bundle(tmp_path)
    nodes = [
        Node(arguments=load(bundle).arguments, environment={"STAGEPACK_NCCL": "yes"} if rank else {})
        for rank in range(2)
    ]
    with launched(nodes) as processes:
        for reason in reasons(processes):
            assert "process 1 on" in reason
            assert "STAGEPACK_NCCL: expected 1 or 0, found 'yes'" in reason


def facts_of(*ports: str) -> list[StageFacts]:
    """Facts of stages in processes of their own, from rank 1 on."""
    common = {"host": "a", "process_id": 1, "runtime": "torch", "device": "cuda:0"}
    return [
        StageFacts(stage=number, rank=1 + number, stored_stages=(number,), port=port, **common)  # type: ignore[arg-type]
        for number, port in enumerate(ports)
    ]


@pytest.mark.parametrize(
    ("ports", "joined"),
    [
        (("nccl A", "nccl B", "nccl C"), [True, True]),
        (("nccl A", "nccl A", "nccl C"), [False, True]),  # one GPU
        (("nccl A", "", "nccl C"), [False, False]),
        (("nccl A", "gloo B", "gloo C"), [False, True]),
    ],
)
def test_routes_between_two_devices_of_one_backend_are_marked(
    ports: Sequence[str], joined: Sequence[bool], layers: Bundle
) -> None:
    found = routes.find_routes(layers.entry_point, (1, 2, 3), {})
    marked = mark_device_routes(found, facts_of(*ports))

    def are_joined(route: Route) -> bool:
        return route.joins_devices

    between = [route for route in marked if route.source_rank and route.target_rank == route.source_rank + 1]
    assert list(map(are_joined, between)) == joined
    assert not any(are_joined(route) for route in marked if 0 in (route.source_rank, route.target_rank))


def test_the_host_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGEPACK_NCCL", raising=False)
    assert device_port("torch", torch.device("cuda:0")) == ""
    monkeypatch.setenv("STAGEPACK_NCCL", "1")
    assert device_port("torch", torch.device("cpu")) == device_port("onnxruntime", "cuda:0") == ""
    if not torch.distributed.is_nccl_available():
        with pytest.raises(OptionError, match="this build of torch has no NCCL: unset the variable"):
            device_port("torch", torch.device("cuda:0"))
