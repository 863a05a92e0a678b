"""The commands of `group.yaml`, run on this machine as the pods of a group: LeaderWorkerSet's variables in the environment."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from tests.distributed.bundles import export_layers
from tests.kubernetes.manifests import container_of, expand, templates, worker_set
from tests.process_facts import child_processes
from tests.serve.servers import http_client

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
IDS = torch.arange(6)
TOKEN = "a-token-of-at-least-16-characters"  # noqa: S105 - of these servers alone


@dataclass(frozen=True, slots=True)
class Group:
    """The pods of `group.yaml` as processes of this machine, each with a bundle of its own."""

    bundle: Bundle
    tokens: Path
    size: int
    paths: Mapping[int, Path] = field(default_factory=dict)

    def start_pod(self, index: int) -> "subprocess.Popen[str]":
        container = container_of(templates(worker_set())[min(index, 1)])
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        variables |= {
            "LWS_LEADER_ADDRESS": "localhost",
            "LWS_GROUP_SIZE": str(self.size),
            "LWS_WORKER_INDEX": str(index),
        }
        variables["BUNDLE_DIGEST"] = self.bundle.digest
        places = {
            "/models/tower.stagepack": str(self.paths.get(index, self.bundle.path)),
            "/etc/stagepack/tokens/tokens": str(self.tokens if index == 0 else self.tokens.with_name("no-such-file")),
        }
        command = [expand(argument, variables) for argument in container["command"]]
        for path, place in places.items():
            assert sum(path in argument for argument in command) == 1
            command = [argument.replace(path, place) for argument in command]
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @contextlib.contextmanager
    def pods(self) -> Iterator[list["subprocess.Popen[str]"]]:
        """The processes by number; the workers begin first, as may happen."""
        started = [self.start_pod(index) for index in reversed(range(self.size))][::-1]
        try:
            yield started
        finally:
            for pod in started:
                kill_pod(pod)
                if pod.stdout is not None:
                    pod.stdout.close()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o400)
    return path


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_layers(tmp_path_factory.mktemp("bundles"))


def process_ids(pod: "subprocess.Popen[str]") -> list[int]:
    """The process ids of torchrun, and of the processes that it has started."""
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


def ask() -> torch.Tensor:
    http = sys.modules["tritonclient.http"]
    ids = http.InferInput("ids", list(IDS.shape), "INT64").set_data_from_numpy(IDS.numpy())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with contextlib.closing(http_client(8000)) as client:
        assert client.is_server_ready()
        return torch.from_numpy(client.infer("tower", [ids], headers=headers).as_numpy("output").copy())


@pytest.fixture(autouse=True)
def _free_ports() -> None:
    for port in (8000, 8001, 9000, 29500):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                pytest.skip("a port of the manifest is in use on this machine")


@pytest.mark.skipif(shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None, reason="no torchrun")
def test_two_pods_answer_and_stop_in_order(layers: Bundle, tokens: Path) -> None:
    pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    expected = stagepack.load(layers)(IDS)
    with Group(layers, tokens, 2).pods() as pods:
        wait_until_listening(pods[0])
        assert torch.equal(ask(), expected)
        for pod, template in zip(pods, templates(worker_set()), strict=True):
            reserved = int(container_of(template)["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20
            assert resident_bytes(pod) < reserved
        assert is_alive(pods[1])
        for child in child_processes(pods[1].pid):
            os.kill(child, signal.SIGSTOP)
        assert not is_alive(pods[1])
        for child in child_processes(pods[1].pid):
            os.kill(child, signal.SIGCONT)
        for pod in pods:  # Kubernetes tells all pods at once
            pod.send_signal(signal.SIGTERM)
        for pod in pods:
            pod.wait(timeout=40)
        assert pods[0].stdout is not None
        assert "stopped: 1 OK" in pods[0].stdout.read()


def is_alive(worker: "subprocess.Popen[str]") -> bool:
    """What the liveness probe of the workers says, in whose containers torchrun is process 1."""
    command = container_of(templates(worker_set())[1])["livenessProbe"]["exec"]["command"]
    here = [argument.replace("/proc/1/", f"/proc/{worker.pid}/") for argument in command]
    return subprocess.run(here, check=False).returncode == 0


def test_a_lost_pod_ends_the_group(layers: Bundle, tokens: Path) -> None:
    with Group(layers, tokens, 2).pods() as pods:
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
    layers: Bundle, tokens: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    copy = tmp_path / "copy" / layers.path.name
    shutil.copytree(layers.path, copy)
    damage(copy)
    with Group(layers, tokens, 3, {2: copy}).pods() as pods:
        (line,) = last_lines(pods)
        assert line.startswith(f"process 2 on {socket.gethostname()}: {reason.format(path=copy)}")
