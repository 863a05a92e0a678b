"""Bundles and servers, each made once for all tests of a folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.cli import main
from tests.serve.bundles import Slow, export_all
from tests.serve.servers import Client, Server, stagepack_server, triton_server, why_no_triton
from tests.serve.version_models import Repository, export_counter, export_scale, repository_server

# Bundles that the servers of the compatibility suite serve.
SERVED = ("minilm", "skips", "half", "kinds", "strided", "counting")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return export_all(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def pipes(bundles: Mapping[str, Path]) -> Mapping[str, object]:
    return {bundle_name: stagepack.load(path) for bundle_name, path in bundles.items()}


@pytest.fixture(scope="session")
def torch_server(bundles: Mapping[str, Path]) -> Iterator[Server]:
    with stagepack_server([bundles[bundle_name] for bundle_name in SERVED]) as server:
        yield server


@pytest.fixture(scope="session")
def triton(bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if reason := why_no_triton():
        pytest.skip(reason)
    repository = tmp_path_factory.mktemp("repository")
    for bundle_name in SERVED:
        main(["triton", str(bundles[bundle_name]), "-o", str(repository)], standalone_mode=False)
    with triton_server(repository, tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture(scope="session")
def process_server(bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three processes for each bundle, which is cut again for them."""
    folder = tmp_path_factory.mktemp("recut")
    recut = [
        stagepack.recut(bundles[bundle_name], out=folder / bundles[bundle_name].name, stages=3)
        for bundle_name in SERVED
    ]
    with stagepack_server([bundle.path for bundle in recut], "--processes", "3") as server:
        yield server


_SERVER_FIXTURES = {"serve": "torch_server", "triton": "triton", "processes": "process_server"}


@pytest.fixture(scope="session", params=["serve", "triton", pytest.param("processes", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(_SERVER_FIXTURES[request.param])


@pytest.fixture(params=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(request.param, server) as client:
        yield client


@pytest.fixture(scope="session")
def small(bundles: Mapping[str, Path]) -> Iterator[Server]:
    """A server of narrow limits."""
    with stagepack_server([bundles["skips"]], "--max-body-mb", "0.1") as server:
        yield server


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose calls take as long as an input says."""
    path = tmp_path_factory.mktemp("slow") / "slow.stagepack"
    stagepack.export(Slow(), (torch.ones(256, 512), torch.tensor(2)), out=path, stages=1)
    return path


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A server of a model repository, whose clients load models. Each test has models of its own, beside two that are always there."""
    folder = tmp_path_factory.mktemp("models")
    export_scale(folder / "scale" / "1", 1.0)
    export_counter(folder / "counter" / "1", 1.0)
    with repository_server(folder, "--load-model", "*", "--sequence-idle-s", "1.5") as repository:
        yield repository
