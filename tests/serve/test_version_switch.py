"""Versions are replaced under load of 32 connections, and no request fails."""

import contextlib
import functools
import itertools
import shutil
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from tritonclient.utils import InferenceServerException

import stagepack
from tests.bundle_editor import BundleEditor
from tests.modules import module_of
from tests.serve.bundles import Slow, export_slow
from tests.serve.local_server import serving
from tests.serve.servers import AnyServer, Client, ask_slow, stagepack_server, wait_for_requests
from tests.serve.version_models import Repository, count, export_counter, export_scale, factor_of, repository_server
from tests.waiting import wait_until

CONNECTIONS = 32
REQUESTS_OF_A_SEQUENCE = 5


class Load:
    """Clients that ask as fast as they can, on a connection each.

    Attributes:
        factors: how often each version of the model without state has answered.
        steps: how many sequences each version of the model with state has run from their begin to their end.
    """

    def __init__(self, server: AnyServer) -> None:
        self.factors: Counts[float] = Counts()
        self.steps: Counts[float] = Counts()
        self._server = server
        self._is_over = threading.Event()
        self._sequence_ids = itertools.count(1)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask during the context. Three of four clients ask the model without state, and half of all over each protocol."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            clients = [
                pool.submit(
                    self._repeat, ("http", "grpc")[number % 2], self._run_sequence if number % 8 < 2 else self._ask
                )
                for number in range(CONNECTIONS)
            ]
            try:
                wait_until(lambda: self.factors.total() > CONNECTIONS and self.steps.total() > CONNECTIONS / 4)
                yield
            finally:
                self._is_over.set()
        for client in clients:
            client.result()  # raises what a client met

    def wait_for(self, factor: float, step: float) -> None:
        """Wait until both versions answer, and so that each client has asked since."""
        before = self.factors.total()
        wait_until(lambda: self.factors[factor] > 0 and self.steps[step] > 0)
        wait_until(lambda: self.factors.total() > before + CONNECTIONS)

    def _repeat(self, protocol: str, ask: Callable[[Client], None]) -> None:
        with Client(protocol, self._server) as client:
            while not self._is_over.is_set():
                ask(client)

    def _ask(self, client: Client) -> None:
        self.factors[factor_of(client, "scale")] += 1

    def _run_sequence(self, client: Client) -> None:
        """All requests of a sequence must run on one version: its sums are multiples of one step."""
        sequence_id = next(self._sequence_ids)
        last = REQUESTS_OF_A_SEQUENCE - 1
        sums = [
            count(client, "counter", sequence_id, sequence_start=number == 0, sequence_end=number == last)
            for number in range(REQUESTS_OF_A_SEQUENCE)
        ]
        assert sums == [sums[0] * (number + 1) for number in range(REQUESTS_OF_A_SEQUENCE)], sums
        self.steps[sums[0]] += 1


def replace_everything(repository: Repository, load: Load) -> None:
    """New versions, refused versions, and folders of loaded versions that are overwritten."""
    with Client("http", repository.server) as rest, Client("grpc", repository.server) as grpc:
        export_scale(repository.folder / "scale" / "2", 2.0)
        export_counter(repository.folder / "counter" / "2", 20.0)
        rest.raw.load_model("scale")
        grpc.raw.load_model("counter")
        load.wait_for(2.0, 20.0)

        for name in ("scale", "counter"):
            broken = shutil.copytree(repository.folder / name / "2", repository.folder / name / "3")
            BundleEditor(broken).flip_bit("stage-0.safetensors", -4)
            with pytest.raises(InferenceServerException, match="the content was changed"):
                grpc.raw.load_model(name)
            assert repository.index(name)["3"]["state"] == "UNAVAILABLE"
            shutil.rmtree(broken)

        # The folders of the loaded versions are replaced, and then loaded again under the same numbers.
        before = load.factors[2.0]
        export_scale(repository.folder / "scale" / "2", 4.0)
        export_counter(repository.folder / "counter" / "2", 40.0)
        wait_until(lambda: load.factors[2.0] > before + CONNECTIONS)
        assert load.factors.keys() == {1.0, 2.0}
        grpc.raw.load_model("scale")
        rest.raw.load_model("counter")
        load.wait_for(4.0, 40.0)
        wait_until(lambda: repository.states("scale") == repository.states("counter") == {"2": "READY"})


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "1"), marks=pytest.mark.slow)])
def test_no_request_fails_while_versions_are_replaced(tmp_path: Path, options: tuple[str, ...]) -> None:
    export_scale(tmp_path / "scale" / "1", 1.0)
    export_counter(tmp_path / "counter" / "1", 1.0)
    with repository_server(
        tmp_path, "--load-model", "*", "--max-sequences", "64", *options, serve=serving
    ) as repository:
        load = Load(repository.server)
        with load.running():
            replace_everything(repository, load)
        assert load.factors.keys() == {1.0, 2.0, 4.0}
        assert load.steps.keys() == {1.0, 20.0, 40.0}
        asked = load.factors.total() + REQUESTS_OF_A_SEQUENCE * load.steps.total()
        assert repository.server.answers() == {"OK": asked}
    print(f"{asked} requests, {dict(load.factors)}, {dict(load.steps)}")  # noqa: T201 - pytest -s shows it


def _is_alone(repository: Repository, version: str) -> bool:
    return repository.states("wide") == {version: "READY"}


@pytest.mark.slow
def test_the_memory_of_old_versions_is_freed(tmp_path: Path) -> None:
    with repository_server(tmp_path, serve=stagepack_server) as repository, Client("grpc", repository.server) as client:
        (tmp_path / "wide").mkdir()
        memories = []
        for version in range(1, 21):
            path = tmp_path / "wide" / str(version)
            weight = torch.nn.Parameter(torch.full((16_000_000,), float(version)))
            stagepack.export(module_of(lambda self, x: x * self.w.max(), w=weight), (torch.ones(2),), out=path)
            client.raw.load_model("wide")
            answer = client.ask("wide", {"x": numpy.ones(2, "float32")})
            assert answer["output"].tolist() == [version, version]
            wait_until(functools.partial(_is_alone, repository, str(version)))
            time.sleep(0.5)
            memories.append(repository.server.memory())
            shutil.rmtree(path)
    print([memory >> 20 for memory in memories])  # noqa: T201 - pytest -s shows it
    assert max(memories[5:]) < memories[1] + 100e6  # a version has 64 MB


@pytest.mark.slow
def test_a_long_request_ends_on_the_version_that_it_began_on(tmp_path: Path) -> None:
    def export_version(version: int) -> None:
        model = Slow()
        model.register_buffer("weight", torch.full((512, 512), version / 256))
        export_slow(tmp_path / "slow" / str(version), model)

    export_version(1)
    with repository_server(tmp_path, "--load-model", "slow") as repository, ThreadPoolExecutor(4) as pool:
        expected = ask_slow(repository.server, 3)
        requests = [pool.submit(ask_slow, repository.server, 700, protocol) for protocol in ("http", "grpc") * 2]
        wait_for_requests(repository.server, "slow", 5)
        export_version(2)
        with Client("http", repository.server) as client:
            client.raw.load_model("slow")
        assert repository.states("slow") == {"1": "UNLOADING", "2": "READY"}
        assert not numpy.array_equal(ask_slow(repository.server, 3), expected)
        assert all(numpy.isfinite(request.result()).all() for request in requests)
        wait_until(lambda: repository.states("slow") == {"2": "READY"})


@pytest.mark.slow
def test_threads(slow: Path) -> None:
    thread_counts = []
    for threads in ("1", "8"):  # threads that answer requests come and go
        with stagepack_server([slow], "--threads", threads) as server:
            ask_slow(server, 20)
            thread_counts.append(len(list(Path(f"/proc/{server.process.pid}/task").iterdir())))
    assert thread_counts[0] < thread_counts[1]
