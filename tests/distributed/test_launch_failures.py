"""A group on several nodes that fails: the last line of each node says which process on which host, and why."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

import stagepack
from stagepack.errors import StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed import launch_failures
from stagepack_loaders.distributed.launch_failures import LaunchFailures
from stagepack_loaders.distributed.meeting import Seat
from stagepack_loaders.distributed.process_group import open_store
from tests.distributed.bundles import tree_environment
from tests.distributed.launchers import HOST, Node, free_port, launched, load, reasons, torchruns
from tests.process_facts import child_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("hosts")


def copy_with_changed_byte(bundle: Bundle, file_name: str, folder: Path) -> Path:
    copy = folder / "copy" / bundle.path.name
    shutil.copytree(bundle.path, copy)
    content = bytearray((copy / file_name).read_bytes())
    content[-1] ^= 1
    (copy / file_name).write_bytes(content)
    return copy


@pytest.mark.parametrize("failing_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_missing_bundle_is_told_by_both_torchruns(layers: Bundle, tmp_path: Path, failing_rank: int) -> None:
    nodes = [load(layers), load(layers)]
    nodes[failing_rank] = load(tmp_path / "nothing.stagepack")
    with torchruns(nodes) as processes:
        lines = reasons(processes)
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        f"process {failing_rank} on {HOST}: {tmp_path}/nothing.stagepack: not a stagepack bundle"
    )


def test_changed_byte_names_process_host_and_path(layers: Bundle, tmp_path: Path) -> None:
    copy = copy_with_changed_byte(layers, "stage-2.safetensors", tmp_path)
    with launched([load(layers), load(layers), load(copy)]) as processes:
        lines = reasons(processes)
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"process 2 on {HOST}: {copy}: stage-2.safetensors: the content was changed")


def test_other_bundle_is_told(layers: Bundle, tmp_path: Path) -> None:
    other = stagepack.recut(layers, out=tmp_path / "layers.stagepack", split_at=["first"])
    with launched([load(layers), load(other)]) as processes:
        for line in reasons(processes):
            assert f"rank 0 on {HOST} has {layers.digest}, rank 1 on {HOST} has {other.digest}" in line


@pytest.mark.slow
def test_other_version_is_told(layers: Bundle, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "find = metadata.version\n"
        "metadata.version = lambda package: '9.9' if package == 'stagepack' else find(package)\n"
    )
    node = load(layers)
    search_path = os.pathsep.join([str(tmp_path), tree_environment()["PYTHONPATH"]])
    other_node = Node(arguments=node.arguments, environment={"PYTHONPATH": search_path})
    with torchruns([node, other_node]) as processes:
        for line in reasons(processes):
            assert "expected one version of stagepack in all processes: rank 0 on" in line
            assert f"rank 1 on {HOST} has 9.9: install the same one on all nodes" in line


def test_taken_port_of_the_server_is_told(layers: Bundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = ["--host", "127.0.0.1", "--http-port", str(port), "--grpc-port", "0"]
        with launched([Node(arguments=["serve", layers.path, *options])] * 2) as processes:
            lines = reasons(processes)
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"process 0 on {HOST}: 127.0.0.1 port {port}: cannot listen for HTTP")


def test_more_processes_than_stages_are_told(layers: Bundle) -> None:
    with launched([load(layers)] * 4) as processes:
        for rank, line in enumerate(reasons(processes)):
            assert line.startswith(f"process {rank} on {HOST}: expected 1 to 3 processes for 3 stages")


@pytest.mark.slow
def test_nodes_that_were_started_for_groups_of_other_sizes_are_told(layers: Bundle) -> None:
    node = load(layers)
    with launched([node, Node(arguments=node.arguments, environment={"WORLD_SIZE": "3"})]) as processes:
        for line in reasons(processes):
            assert f"expected one number of processes in all processes: rank 0 on {HOST} has 2, rank 1 on" in line


@pytest.mark.slow
def test_two_nodes_of_one_rank_are_told(layers: Bundle) -> None:
    node = load(layers)
    second = Node(arguments=node.arguments, environment={"RANK": "1"})
    with launched([node, second, second]) as processes:
        for line in reasons(processes):
            assert "expected one process of rank 1, found two: " in line


def test_process_without_signs_of_life_is_told_while_the_group_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing connects the processes yet."""
    monkeypatch.setattr(launch_failures, "_SILENCE_SECONDS", 2.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    store = open_store()
    front, other = LaunchFailures(Seat(store, 0, 2)), LaunchFailures(Seat(store, 1, 2))
    with front.watching():
        store.set("host/1", "node-1")
        store.add("sign/1", 1)
        says = r"^process 1 on node-1 is lost: it has shown no sign of life for [1-9] s"
        with pytest.raises(StageLostError, match=says):
            wait_until_raised(front)
    with other.watching(), pytest.raises(StageLostError, match="process 1 on node-1 is lost"):
        wait_until_raised(other)


def wait_until_raised(failures: LaunchFailures) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        failures.check()
        time.sleep(0.05)


@pytest.mark.parametrize("lost_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lost_node_is_told_by_the_other_torchrun(layers: Bundle, lost_rank: int) -> None:
    options = ["--host", "127.0.0.1", "--http-port", str(free_port()), "--grpc-port", "0", "--linger-s", "0"]
    with torchruns([Node(arguments=["serve", layers.path, *options])] * 2) as processes:
        wait_until(lambda: "REST on" in processes[0].output)
        lost_process = processes[lost_rank].process.pid
        for process_id in (lost_process, *child_processes(lost_process)):
            os.kill(process_id, signal.SIGKILL)
        (line,) = reasons([processes[1 - lost_rank]])
    assert line.startswith(f"process {lost_rank} on {HOST}")
    assert " is lost: " in line
