"""The command of the containers, run on this machine as the pods of a group: LeaderWorkerSet's variables in the environment."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from tests.kubernetes.deployment import container_of, expand, templates, write_deployment
from tests.process_facts import child_processes
from tests.serve.servers import http_client

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
IDS = torch.arange(6)


def start_pod(container: dict[str, Any], index: int, group_size: int, path: str | None) -> "subprocess.Popen[str]":
    variables = {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": str(group_size), "LWS_WORKER_INDEX": str(index)}
    variables |= {variable["name"]: variable["value"] for variable in container["env"]}
    command = [expand(argument, variables) for argument in container["command"]]
    if path is not None:
        command = [re.sub("=/.*", f"={path}", argument) for argument in command]
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def group_of_pods(
    worker_set: dict[str, Any], paths: Mapping[int, str] = MappingProxyType({})
) -> Iterator[list["subprocess.Popen[str]"]]:
    """The pods of a group as processes; the workers begin first, as may happen.

    paths: where pods find another bundle than that of the command.
    """
    size = worker_set["spec"]["leaderWorkerTemplate"]["size"]
    leader, worker = map(container_of, templates(worker_set))
    pods = [start_pod(worker, index, size, paths.get(index)) for index in range(size - 1, 0, -1)]
    pods.append(start_pod(leader, 0, size, paths.get(0)))
    pods.reverse()
    try:
        yield pods
    finally:
        for pod in pods:
            kill_pod(pod)
            if pod.stdout is not None:
                pod.stdout.close()


def process_ids(pod: "subprocess.Popen[str]") -> list[int]:
    """Of torchrun, and of the processes that it has started."""
    return [pod.pid, *child_processes(pod.pid)] if Path(f"/proc/{pod.pid}").exists() else []


def kill_pod(pod: "subprocess.Popen[str]") -> None:
    for process_id in process_ids(pod):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    pod.wait()


def last_lines(pods: list["subprocess.Popen[str]"]) -> set[str]:
    """The reason that each pod gives, when all have ended."""
    outputs = [pod.communicate(timeout=60)[0] for pod in pods]
    assert all(pod.returncode != 0 for pod in pods)
    reports = [[line for line in output.splitlines() if line.strip("= ")][-1] for output in outputs]
    return {report.removeprefix("  traceback : ") for report in reports}


def wait_until_listening(leader: "subprocess.Popen[str]") -> None:
    assert leader.stdout is not None
    lines: list[str] = []
    while not lines or "REST on" not in lines[-1]:
        lines.append(leader.stdout.readline())
        assert lines[-1], "".join(lines)


def resident_bytes(pod: "subprocess.Popen[str]") -> int:
    return sum(
        int(line.split()[1]) * 1024
        for process_id in process_ids(pod)
        for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
        if line.startswith("Rss:")
    )


def ask(model_name: str) -> torch.Tensor:
    http = sys.modules["tritonclient.http"]
    ids = http.InferInput("ids", list(IDS.shape), "INT64").set_data_from_numpy(IDS.numpy())
    with contextlib.closing(http_client(8000)) as client:
        assert client.is_server_ready()
        return torch.from_numpy(client.infer(model_name, [ids]).as_numpy("output").copy())


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@pytest.mark.skipif(shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None, reason="no torchrun")
def test_two_pods_answer_and_stop_in_order(layers: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    if not all(map(is_free, (8000, 8001, 29500))):
        pytest.skip("a port of the deployment is in use on this machine")
    worker_set, _, _ = write_deployment(layers, tmp_path, "--pods", "2", "--path", str(layers.path), "--name", "net")
    expected = stagepack.load(layers)(IDS)
    with group_of_pods(worker_set) as pods:
        wait_until_listening(pods[0])
        assert torch.equal(ask("net"), expected)
        for pod, template in zip(pods, templates(worker_set), strict=True):
            reserved = int(container_of(template)["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20
            assert resident_bytes(pod) < reserved
        for pod in pods:  # Kubernetes tells all pods at once
            pod.send_signal(signal.SIGTERM)
        for pod in pods:
            pod.wait(timeout=40)
        assert pods[0].stdout is not None
        assert "stopped: 1 OK" in pods[0].stdout.read()


def test_a_lost_pod_ends_the_group(layers: Bundle, tmp_path: Path) -> None:
    if not all(map(is_free, (8000, 8001, 29500))):
        pytest.skip("a port of the deployment is in use on this machine")
    worker_set, _, _ = write_deployment(layers, tmp_path, "--pods", "2", "--path", str(layers.path), "--linger-s", "1")
    with group_of_pods(worker_set) as pods:
        wait_until_listening(pods[0])
        kill_pod(pods[1])
        # With another status than 0, Kubernetes starts the container again, and LeaderWorkerSet the group.
        (line,) = last_lines(pods[:1])
        assert line.startswith(f"process 1 on {socket.gethostname()}, which runs stage")


def change_file(bundle: Path) -> None:
    content = bytearray((bundle / "stage-2.safetensors").read_bytes())
    (bundle / "stage-2.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "{path}: not a stagepack bundle"),
        (change_file, "{path}: stage-2.safetensors: the content was changed"),
    ],
    ids=["missing bundle", "changed byte"],
)
def test_three_pods_say_which_of_them_failed_and_why(
    layers: Bundle, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    if not all(map(is_free, (8000, 8001, 29500))):
        pytest.skip("a port of the deployment is in use on this machine")
    copy = tmp_path / "copy" / layers.path.name
    shutil.copytree(layers.path, copy)
    worker_set, _, _ = write_deployment(layers, tmp_path, "--path", str(layers.path))
    damage(copy)
    with group_of_pods(worker_set, {2: str(copy)}) as pods:
        (line,) = last_lines(pods)
        assert line.startswith(f"process 2 on {socket.gethostname()}: {reason.format(path=copy)}")
