"""Processes on several hosts, which are network namespaces: each reads its own copy of its own files."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack_loaders.placement import place_stages
from tests.distributed import host_client, host_program
from tests.distributed.network_hosts import NetworkHost, network_hosts

pytestmark = pytest.mark.xdist_group("hosts")
_PORT = 29500
_LOST_SECONDS = 5.0
NO_COMMAND: Sequence[str | Path] = ["true"]
Processes = list["subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[list[NetworkHost]]:
    with network_hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def calls() -> list[torch.Tensor]:
    """Ids for 60 calls, no two of which in a row have one size."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, (1 + 97 * number % 50,), generator=generator) for number in range(60)]


class Script:
    """`host_program` and its files."""

    def __init__(self, calls: Sequence[torch.Tensor], folder: Path) -> None:
        self._calls = calls
        self._calls_file = folder / "calls.safetensors"
        self._answers_file = folder / "answers.safetensors"
        save_file({f"{number:03}": ids for number, ids in enumerate(calls)}, self._calls_file)

    def command(self, bundle: Bundle | Path, *flags: str) -> list[str | Path]:
        path = bundle.path if isinstance(bundle, Bundle) else bundle
        return [sys.executable, host_program.__file__, path, self._calls_file, self._answers_file, *flags]

    def check_answers(self, bundle: Bundle) -> None:
        """Compare the answers with those of one process, bit for bit."""
        one = stagepack.load(bundle)
        answers = [answer for _, answer in sorted(load_file(self._answers_file).items())]
        with torch.no_grad():
            assert all(torch.equal(answer, one(ids)) for answer, ids in zip(answers, self._calls, strict=True))


@pytest.fixture
def script(calls: list[torch.Tensor], tmp_path: Path) -> Script:
    return Script(calls, tmp_path)


@contextlib.contextmanager
def launched(
    hosts: Sequence[NetworkHost],
    commands: Sequence[Sequence[str | Path]],
    *,
    size: int | None = None,
    master_addresses: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Processes]:
    """A process on each host, with the variables that a launcher sets. The first has rank 0."""
    addresses = master_addresses or [hosts[0].address] * len(hosts)
    processes = [
        host.start(
            command,
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(size or len(hosts)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(_PORT),
                **(environment or {}),
            },
        )
        for rank, (host, command, address) in enumerate(zip(hosts, commands, addresses, strict=True))
    ]
    with ended_at_last(hosts, processes):
        yield processes


@contextlib.contextmanager
def torchrun(
    hosts: Sequence[NetworkHost], commands: Sequence[Sequence[str | Path]], *options: str
) -> Iterator[Processes]:
    """torchrun on each host, with one process each."""
    group = ["--nnodes", str(len(hosts)), "--master-addr", hosts[0].address, "--master-port", str(_PORT), *options]
    processes = [
        host.start([sys.executable, "-m", "torch.distributed.run", *group, "--node-rank", str(rank), *command[1:]])
        for rank, (host, command) in enumerate(zip(hosts, commands, strict=True))
    ]
    with ended_at_last(hosts, processes):
        yield processes


@contextlib.contextmanager
def ended_at_last(hosts: Sequence[NetworkHost], processes: Processes) -> Iterator[None]:
    try:
        yield
    finally:
        for host in hosts:
            host.kill_processes()
        for process in processes:
            process.communicate()


def read_line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def wait(processes: Processes, seconds: float = 60.0) -> list[tuple[int, str]]:
    """The exit status and the errors of each process."""
    errors = [process.communicate(timeout=seconds)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def copy_for_rank(bundle: Bundle, rank: int, size: int, folder: Path) -> Path:
    """A copy of a bundle with the files of the stages of one rank alone, and the example for rank 0, which has the inputs."""
    ranks = place_stages(bundle.entry_point, range(size))
    stages = [stage for stage, stage_rank in zip(bundle.stages, ranks, strict=True) if stage_rank == rank]
    names = {MANIFEST_NAME, *(name for stage in stages for name in (stage.graph, *stage.weights))}
    if rank == 0:
        names.add("example.safetensors")
    copy = folder / f"rank-{rank}" / bundle.path.name
    copy.mkdir(parents=True)
    for name in names:
        shutil.copy(bundle.path / name, copy / name)
    return copy


def test_hosts_with_their_own_files_answer_as_one_process(
    hosts: list[NetworkHost], layers: Bundle, script: Script, tmp_path: Path
) -> None:
    commands = [script.command(copy_for_rank(layers, rank, 3, tmp_path)) for rank in range(3)]
    with launched(hosts, commands) as processes:
        facts = read_line(processes[0])
        for number, (host, stage) in enumerate(zip(hosts, layers.stages, strict=True)):
            assert facts[str(number)] == [host.name, stage.graph, *stage.weights]
        assert [status for status, _ in wait(processes)] == [0, 0, 0]
        script.check_answers(layers)
        assert not any(host.process_ids() for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 0, 1)], ids=["on three hosts", "two on one host"])
def test_a_host_whose_name_is_a_loopback_address_there(
    places: Sequence[int], hosts: list[NetworkHost], layers: Bundle, script: Script
) -> None:
    addresses = [hosts[0].address if place else hosts[0].name for place in places]  # the name is 127.0.1.1 on this host
    commands = [script.command(layers)] * 3
    with launched([hosts[place] for place in places], commands, master_addresses=addresses) as processes:
        assert [status for status, _ in wait(processes)] == [0, 0, 0]
        script.check_answers(layers)


@pytest.mark.parametrize(
    ("how", "lost_rank"),
    [
        ("cut_link", 2),
        pytest.param("cut_link", 1, marks=pytest.mark.slow),
        pytest.param("kill_processes", 1, marks=pytest.mark.slow),
        pytest.param("kill_processes", 2, marks=pytest.mark.slow),
    ],
)
def test_a_lost_host_is_told(
    how: str, lost_rank: int, hosts: list[NetworkHost], layers: Bundle, script: Script
) -> None:
    with launched(hosts, [script.command(layers, "--until-lost")] * 3) as processes:
        read_line(processes[0])
        lost_time = time.monotonic()
        getattr(hosts[lost_rank], how)()
        lost = read_line(processes[0])
        assert lost["time"] - lost_time < _LOST_SECONDS
        assert lost["stages"] == [lost_rank]
        assert lost["host"] == hosts[lost_rank].name
        assert f"process {lost_rank} on {hosts[lost_rank].name}, which runs stage {lost_rank}, is lost" in lost["error"]
        reached = [process for rank, process in enumerate(processes) if rank != lost_rank]
        outcomes = wait(reached, _LOST_SECONDS)
        assert [status for status, _ in outcomes] == [3, 75]
        assert outcomes[1][1].splitlines()[-1].startswith(f"process {lost_rank} on {hosts[lost_rank].name}, which runs")


@pytest.mark.slow
@pytest.mark.parametrize("cut_rank", [0, 2])
def test_no_process_stays_on_hosts_that_are_cut_off(
    cut_rank: int, hosts: list[NetworkHost], layers: Bundle, script: Script
) -> None:
    with launched(hosts, [script.command(layers, "--until-lost")] * 3) as processes:
        read_line(processes[0])
        hosts[cut_rank].cut_link()
        statuses = [status for status, _ in wait(processes, 20)]
        assert statuses == [3, 75, 75]


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(hosts: list[NetworkHost], layers: Bundle, script: Script) -> None:
    commands = [script.command(layers), script.command(layers), NO_COMMAND]
    with launched(hosts, commands, environment={"START_SECONDS": "4"}) as processes:
        first, second, _ = wait(processes)
    assert first[0] == 1
    assert (
        f"GroupError: process 0 on {hosts[0].name}: expected 3 processes, after 4 s there is no identity of rank 2"
        in first[1]
    )
    assert second[0] in (1, 75)  # 75 if it learns nothing but that process 0 has ended, with its store


@pytest.mark.slow
def test_all_say_that_process_0_does_not_come(hosts: list[NetworkHost], layers: Bundle, script: Script) -> None:
    commands = [NO_COMMAND, script.command(layers), script.command(layers)]
    with launched(hosts, commands, environment={"START_SECONDS": "4"}) as processes:
        for status, error in wait(processes)[1:]:
            assert status == 1
            assert f"expected the store of process 0 at {hosts[0].address}:{_PORT}, by MASTER_ADDR" in error


@pytest.mark.slow
def test_another_bundle_on_one_host_is_told(
    hosts: list[NetworkHost], layers: Bundle, script: Script, tmp_path: Path
) -> None:
    other = stagepack.recut(layers, out=tmp_path / "layers.stagepack", split_at=["first"])
    commands = [script.command(bundle) for bundle in (layers, other)]
    with launched(hosts[:2], commands) as processes:
        status, error = wait(processes)[0]
    assert status == 1
    assert "expected one bundle, by the digest of its manifest in all processes" in error
    assert f"rank 0 on {hosts[0].name} has {layers.digest}, rank 1 on {hosts[1].name} has {other.digest}" in error


@pytest.mark.slow
def test_hosts_that_do_not_connect_are_told_where_they_listen(
    hosts: list[NetworkHost], layers: Bundle, script: Script
) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with launched(hosts, [script.command(layers)] * 3, environment=environment) as processes:
        outcomes = wait(processes, 90)
    assert [status for status, _ in outcomes] == [1, 1, 1]
    (line,) = {error.splitlines()[-1] for _, error in outcomes}
    assert re.match(r"GroupError: process \d on stagehost-\d has no connection with all others", line)


@pytest.mark.slow
def test_torchrun_on_each_host_runs_a_script(hosts: list[NetworkHost], layers: Bundle, script: Script) -> None:
    with torchrun(hosts, [script.command(layers)] * 3) as processes:
        assert [status for status, _ in wait(processes)] == [0, 0, 0]
        script.check_answers(layers)


@pytest.mark.slow
def test_torchrun_on_each_host_runs_a_command(hosts: list[NetworkHost], layers: Bundle, tmp_path: Path) -> None:
    copies = [copy_for_rank(layers, rank, 3, tmp_path) for rank in range(3)]
    with torchrun(hosts, [["python", "-m", "stagepack", "load", copy] for copy in copies]) as processes:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert "largest difference 0\n" in outputs[0]
        assert all(host.name in outputs[0] for host in hosts)
        assert outputs[1:] == ["", ""]


@pytest.mark.slow
def test_torchrun_on_each_host_starts_all_again(hosts: list[NetworkHost], layers: Bundle, script: Script) -> None:
    with torchrun(hosts, [script.command(layers, "--until-lost")] * 3, "--max-restarts", "1") as processes:
        for _ in range(2):
            facts = read_line(processes[0])
            assert [facts[str(number)][0] for number in range(3)] == [host.name for host in hosts]
            script.check_answers(layers)
            (worker,) = set(hosts[1].process_ids()) - {processes[1].pid}  # torchrun has started it
            os.kill(worker, signal.SIGKILL)
            assert read_line(processes[0])["stages"] == [1]
        assert all(status != 0 for status, _ in wait(processes))


@pytest.mark.slow
def test_a_server_over_hosts_comes_back_after_a_loss(hosts: list[NetworkHost], layers: Bundle, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = stagepack.load(layers)(torch.arange(3)).flatten().tolist()
    copies = [copy_for_rank(layers, rank, 3, tmp_path) for rank in range(3)]
    options = ["--host", hosts[0].address, "--http-port", "8000", "--grpc-port", "0"]
    commands: list[list[str | Path]] = [["python", "-m", "stagepack", "serve", copy, *options] for copy in copies]

    def ask() -> Any:
        client = hosts[1].start([sys.executable, host_client.__file__, f"{hosts[0].address}:8000", "0", "1", "2"])
        return json.loads(client.communicate(timeout=20)[0])

    def wait_for(is_answered: bool, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while ((outcome := ask())["status"] == 200) != is_answered:
            assert time.monotonic() < end
            time.sleep(0.1)
        return outcome

    with torchrun(hosts, commands, "--max-restarts", "1") as processes:
        assert wait_for(is_answered=True, seconds=60)["data"] == expected
        (worker,) = set(hosts[2].process_ids()) - {processes[2].pid}
        os.kill(worker, signal.SIGKILL)
        assert wait_for(is_answered=False, seconds=_LOST_SECONDS)["status"] in (0, 503)
        assert wait_for(is_answered=True, seconds=60)["data"] == expected
        processes[0].send_signal(signal.SIGTERM)
        wait(processes, 30)
        assert not any(host.process_ids() for host in hosts)
