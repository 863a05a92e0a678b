"""Stages in Ray actors: the answers of one process, an actor that dies, and nothing left behind. Ray places; gloo moves the tensors."""

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, GroupError, OptionError, StageLostError
from stagepack.format.reader import Bundle
from tests.distributed.bundles import process_ids, run_python, tree_environment
from tests.remote.http_server import HttpServer
from tests.waiting import wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.xdist_group("ray")
CPUS = 0.5
IDS = torch.arange(6)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on this machine alone, with room for four actors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEPACK_CACHE", str(tmp_path_factory.mktemp("ray") / "cache"))
        patch.setenv("PYTHONPATH", tree_environment()["PYTHONPATH"])
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def launch(bundle: Bundle, processes: int | None = None, **options: Any) -> Any:
    return stagepack.ray.launch(bundle, processes, cpus_per_process=CPUS, **options)


def wait_until_gone(process_numbers: Sequence[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{number}/cmdline").exists() for number in process_numbers), 10)


def call_until_lost(pipeline: Any) -> None:
    while True:
        pipeline(IDS)


def free_resources() -> dict[str, float]:
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "memory")}


def test_two_actors_answer_as_one_process_and_come_back(layers: Bundle) -> None:
    one = stagepack.load(layers)
    free_before = free_resources()
    with launch(layers, 2, max_restarts=1) as pipeline:
        first_ids = process_ids(pipeline)
        assert len(set(first_ids.values()) - {os.getpid()}) == 2
        assert free_resources()["CPU"] == free_before["CPU"] - 2 * CPUS
        assert free_resources()["memory"] <= free_before["memory"] - 2 * 2**29
        for size in (1, 9, 2, 4096, 5):
            ids = torch.arange(size) % 10
            assert torch.equal(pipeline(ids), one(ids))
        answers = [pipeline.submit(torch.arange(size % 9 + 1)) for size in range(32)]
        for size, answer in enumerate(answers):
            assert torch.equal(answer.result(), one(torch.arange(size % 9 + 1)))

        os.kill(first_ids[2], signal.SIGKILL)
        with pytest.raises(StageLostError, match=r"process 2 on .*, is lost: its actor died: ") as caught:
            call_until_lost(pipeline)
        assert caught.value.stages == tuple(facts.stage for facts in pipeline.stage_facts if facts.rank == 2)
        wait_until(lambda: pipeline.restart_count == 1)
        for size in (3, 7):
            assert torch.equal(pipeline(torch.arange(size)), one(torch.arange(size)))
        second_ids = process_ids(pipeline)
        assert not set(first_ids.values()) & set(second_ids.values())
    wait_until_gone([*first_ids.values(), *second_ids.values()])
    wait_until(lambda: free_resources() == free_before)


@pytest.mark.slow
def test_what_the_cluster_lacks_is_told(layers: Bundle) -> None:
    says = r"place 3 actors, which need 1.5 CPU, 3000000.0 GB of memory, within 1 s; free are 2 CPU"
    with pytest.raises(GroupError, match=says):
        launch(layers, memory_per_process=10**15, start_seconds=1)
    with pytest.raises(GroupError, match=r"which need 1.5 CPU, 3 GPU, 9\.7 GB of memory, within 1 s; .* 0 GPU"):
        launch(layers, devices=["cuda"], start_seconds=1)
    with pytest.raises(OptionError, match="expected 1 to 3 processes for 3 stages, found 4"):
        launch(layers, 4)


@pytest.mark.slow
def test_errors_of_actors_are_typed(layers: Bundle, tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"runs stages 0, 1, 2, cannot begin: ModuleNotFoundError"):
        launch(layers, 1, imports=["no_such_module"])
    damaged = tmp_path / "damaged.stagepack"
    shutil.copytree(layers.path, damaged)
    weights = damaged / layers.stages[1].weights[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    with pytest.raises(DigestError, match=weights.name):
        launch(Bundle(damaged), 1)


@pytest.mark.slow
def test_actors_end_with_the_process_that_launched_them(layers: Bundle) -> None:
    script = (
        "import os, sys, ray, stagepack, torch\n"
        "ray.init(sys.argv[2], log_to_driver=False)\n"
        "pipeline = stagepack.ray.launch(sys.argv[1], 2, cpus_per_process=0.5)\n"
        "print(*(facts.process_id for facts in pipeline.stage_facts), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    address = ray.get_runtime_context().gcs_address
    finished = run_python("-c", script, str(layers.path), address)
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    wait_until_gone(list(map(int, finished.stdout.split())))


def test_actors_download_the_files_of_their_stages(
    layers: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache = tmp_path / "own"
    monkeypatch.setenv("STAGEPACK_CACHE", str(own_cache))  # the workers of Ray have another one
    with HttpServer(layers.path.parent) as server:
        url = f"{server.url}/{layers.path.name}?token=secret"
        with launch(stagepack.open(url), 2) as pipeline:
            assert torch.equal(pipeline(IDS), stagepack.load(layers)(IDS))
        weight_files = [
            file_name for file_name in layers.files if file_name.startswith("stage-") and "safe" in file_name
        ]
        assert [server.requests[file_name] for file_name in weight_files] == [1] * len(weight_files)
        assert not list(own_cache.glob("bundles/*/stage-*.safetensors"))
        bundle = stagepack.open(url, storage_options={"headers": {"X-Key": "1"}})
        with pytest.raises(OptionError, match="expected a bundle without storage_options"):
            launch(bundle, 2)
