"""Memory of a server: versions that are closed or refused leave none, and what requests took is given back."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import InputError
from stagepack_loaders.options import LoadOptions, ProcessOptions
from stagepack_serving.server import free_memory
from stagepack_serving.server.bundle_listings import fixed_bundles
from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_loading import BundleLoading, ServedBundleOptions
from stagepack_serving.server.model_part import ModelPart
from stagepack_serving.server.model_registry import LoadedBundle, ModelRegistry
from stagepack_serving.server.served_model import ServedModel
from tests.modules import module_of
from tests.process_facts import child_processes, memory_bytes
from tests.serve.attacks import attacking
from tests.serve.local_server import local_server
from tests.serve.servers import Client, Server, post, refused, stagepack_server
from tests.serve.version_models import export_scale
from tests.waiting import wait_until

WEIGHT_BYTES = 80_000_000
LOADS = 20


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many weights in each of two stages."""
    first, second = (torch.nn.Linear(2, WEIGHT_BYTES // 16, bias=False) for _ in range(2))
    forward = lambda self, x: x @ self.first.weight[:2] @ self.second.weight[:2]  # noqa: E731
    model = module_of(forward, first=first, second=second)
    out = tmp_path_factory.mktemp("heavy") / "heavy.stagepack"
    rows = {0: torch.export.Dim("rows", min=1, max=4096)}
    return stagepack.export(model, (torch.ones(2, 2),), out=out, stages=2, dynamic_shapes={"x": rows}).path


def own_bytes(process_id: int) -> int:
    """The memory that a process has for itself alone, and its children for themselves."""
    return memory_bytes(process_id) + sum(map(own_bytes, child_processes(process_id)))


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "2"), marks=pytest.mark.slow)])
def test_closed_versions_leave_no_memory(heavy: Path, options: tuple[str, ...]) -> None:
    with stagepack_server([heavy], "--model-control", "explicit", "--log-level", "error", *options) as server:
        loaded_bytes = 0
        for load_index in range(LOADS):
            assert post(server.http, "/v2/repository/models/heavy/unload", b"")[0] == 200
            assert post(server.http, "/v2/repository/models/heavy/load", b"")[0] == 200
            if load_index == 2:  # the first ones make what libraries keep
                wait_until(lambda: is_closed(server))
                loaded_bytes = own_bytes(server.process.pid)
        wait_until(lambda: own_bytes(server.process.pid) < loaded_bytes + WEIGHT_BYTES // 2, 20)
        assert post(server.http, "/v2/repository/models/heavy/unload", b"")[0] == 200
        wait_until(lambda: own_bytes(server.process.pid) < loaded_bytes - 0.9 * WEIGHT_BYTES, 20)


def is_closed(server: Server) -> bool:
    """Whether the index has no version that is being unloaded."""
    _, entries, _ = post(server.http, "/v2/repository/index", b"")
    return all(entry["state"] != "UNLOADING" for entry in entries)


@pytest.mark.slow
def test_calls_that_lose_their_connection_leave_no_memory(heavy: Path) -> None:
    with stagepack_server([heavy], "--model-control", "explicit", "--log-level", "error") as server:

        def bytes_after_attacks(count: int) -> int:
            for _ in range(count):
                with attacking("calls without a message", server.grpc):
                    time.sleep(1)
            for action in ("unload", "load"):  # gives back what is free
                assert post(server.http, f"/v2/repository/models/heavy/{action}", b"")[0] == 200
            time.sleep(1)
            return own_bytes(server.process.pid)

        bytes_before = bytes_after_attacks(8)
        # grpc alone keeps 640 kB of each attack; arenas differ by 4 MB from one reading to the next.
        assert bytes_after_attacks(32) < bytes_before + 32 * 320_000


class _Weights(ModelPart):
    """Stands for what a version has loaded."""

    objects: list[list[int]]
    model: ServedModel


def test_refused_version_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[_Weights]] = []

    def load_bundle(model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle:
        assert not any(former() for former in loaded)
        weights = _Weights()
        loaded.append(weakref.ref(weights))
        raise InputError(f"{model_name}: other results than those of the example, with {weights}")

    async def load() -> None:
        models = ModelRegistry(ServerLimits(), Metrics())
        control = ModelControl(models, fixed_bundles({"model": ""}), load_bundle, mode="explicit")
        watching = asyncio.create_task(control.watch())
        with pytest.raises(RequestError, match="other results"):
            await control.load("model")
        next_load = asyncio.create_task(control.load("model"))
        await asyncio.sleep(1)
        assert loaded[0]() is not None  # a collection would stop all requests for long
        assert not next_load.done()
        monkeypatch.setattr(free_memory, "_MANY_OBJECTS", sys.maxsize)
        with pytest.raises(RequestError, match="other results"):
            await next_load
        del next_load
        await asyncio.sleep(1)
        assert [former() for former in loaded] == [None, None]
        watching.cancel()

    monkeypatch.setattr(free_memory, "_MANY_OBJECTS", 0)
    gc.disable()  # in a server that has nothing to do, it would come after hours
    try:
        asyncio.run(load())
    finally:
        gc.enable()


def test_a_load_does_not_wait_for_the_objects_of_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model has as many objects as a thousand idle clients, which do not go away."""
    path, models = export_scale(tmp_path / "scale", 2.0), ModelRegistry(ServerLimits(), Metrics())
    load_small = BundleLoading(ServedBundleOptions(load=LoadOptions(), processes=ProcessOptions()), models)
    ballast: list[weakref.ref[_Weights]] = []

    def load_bundle(model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle | None:
        loaded = load_small(model_name, version, path, unless_digest=unless_digest)
        assert loaded is not None
        weights = _Weights()
        weights.objects = [[number] for number in range(60_000)]
        ballast.append(weakref.ref(weights))
        for model in loaded.models:
            model.parts[_Weights], weights.model = weights, model
        return loaded

    async def load_again() -> list[float]:
        watching, times = asyncio.create_task(control.watch()), []
        for _ in range(3):
            start_time = time.monotonic()
            await control.unload("model")
            await control.load("model")
            times.append(time.monotonic() - start_time)
        watching.cancel()
        return times

    monkeypatch.setattr(BundleLoading, "_freeze_libraries", lambda *_: None)
    control = ModelControl(models, fixed_bundles({"model": str(path)}), load_bundle, mode="explicit")
    control.load_at_start()
    assert max(asyncio.run(load_again())) < 8
    assert [former() is None for former in ballast] == [True] * 3 + [False]
    control.close(1)


def test_counting_objects_breaks_no_tuple_that_another_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_MANY_OBJECTS", 50_000)  # servers of other tests have another number
    is_over, interval = threading.Event(), sys.getswitchinterval()
    objects: list[list[int]] = [[] for _ in range(100_000)]  # which take long enough to count for threads to take turns

    def make_tuples() -> None:
        while not is_over.is_set():
            assert len(tuple(number for number in range(30))) == 30

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(make_tuples)
            # With `len(gc.get_objects())`, a quarter of the counts break a tuple.
            has_many = [free_memory._has_many_objects() for _ in range(30)]
            is_over.set()
        making.result()
        assert all(has_many)
    finally:
        sys.setswitchinterval(interval)
    assert len(objects) == 100_000


@pytest.fixture(scope="module")
def summing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that gives memory back soon."""
    out = tmp_path_factory.mktemp("summing") / "summing.stagepack"
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    model = module_of(lambda self, x: x.sum(1, keepdim=True))
    stagepack.export(model, (torch.ones(2, 250_000),), out=out, stages=1, dynamic_shapes={"x": rows})
    constants = {"stagepack_serving.server.free_memory._QUIET_SECONDS": 0.5}
    with stagepack_server([out], constants=constants) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_memory_of_requests_is_given_back(summing: Server, protocol: str) -> None:
    row = numpy.ones((1, 250_000), "float32")

    def ask(request_count: int) -> None:
        with Client(protocol, summing) as client:
            for _ in range(request_count):
                assert client.ask("summing", {"x": row}, outputs=["output"])["output"].shape == (1, 1)

    ask(2)
    quiet_bytes = own_bytes(summing.process.pid)
    with ThreadPoolExecutor(100) as pool:
        list(pool.map(ask, [5] * 100))
    wait_until(lambda: own_bytes(summing.process.pid) < quiet_bytes + 60_000_000, 20)


def test_answer_that_clients_over_grpc_cannot_read_is_refused_before_the_run(tmp_path: Path) -> None:
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    model, out = module_of(lambda self, x: {"much": x.repeat(1, 1000), "little": x * 2}), tmp_path / "repeated"
    bundle = stagepack.export(model, (torch.ones(2, 100),), out=out, stages=1, dynamic_shapes={"x": rows})
    constants = {"stagepack_serving.server.grpc_messages.MAX_ANSWER_BYTES": 1_000_000}
    with local_server([bundle.path], constants=constants) as server:
        inputs = {"x": numpy.ones((3, 100), "float32")}
        with Client("grpc", server) as client:
            with refused("RESOURCE_EXHAUSTED", says="found 1,201,200"):
                client.ask("repeated", inputs)
            assert client.ask("repeated", inputs, outputs=["little"])["little"].shape == (3, 100)
            statistics = client.raw.get_inference_statistics("repeated", as_json=True)["model_stats"][0]
            assert int(statistics["execution_count"]) == 1
        with Client("http", server) as client:
            assert client.ask("repeated", inputs)["much"].shape == (3, 100_000)
