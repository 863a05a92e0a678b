"""Bundles and servers, each made once for all tests of a folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import stagepack
from stagepack.cli import main
from tests.made_once import made_once
from tests.serve.bundles import Bundles, Slow, export_all, export_slow
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import Client, Server, stagepack_server, triton_server, why_no_triton
from tests.serve.version_models import Repository, export_counter, export_scale, repository_server
from tests.text.generating_families import qwen_bundle
from tests.text.generating_model import export_decoder

# Bundles that the servers of the compatibility suite serve.
SERVED = ("minilm", "skips", "half", "kinds", "strided", "counting")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = made_once(tmp_path_factory, "bundles", export_all)
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a tokenizer. Do not write into it."""
    return made_once(tmp_path_factory, "writer", export_decoder) / "writer.stagepack"


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_bundle(tmp_path_factory)


@pytest.fixture(scope="session")
def pipes(bundles: Bundles) -> Mapping[str, object]:
    return {bundle_name: stagepack.load(path) for bundle_name, path in bundles.items()}


@pytest.fixture(scope="session")
def torch_server(bundles: Bundles) -> Iterator[Server]:
    with stagepack_server([bundles[bundle_name] for bundle_name in SERVED]) as server:
        yield server


@pytest.fixture(scope="session")
def triton(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if reason := why_no_triton():
        pytest.skip(reason)
    repository = tmp_path_factory.mktemp("repository")
    for bundle_name in SERVED:
        main(["triton", str(bundles[bundle_name]), "-o", str(repository)], standalone_mode=False)
    with triton_server(repository, tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture(scope="session")
def process_server(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three processes for each bundle, which is cut again for them."""
    folder = tmp_path_factory.mktemp("recut")
    paths = [bundles[bundle_name] for bundle_name in SERVED]
    recut = [stagepack.recut(path, out=folder / path.name, stages=3).path for path in paths]
    with stagepack_server(recut, "--processes", "3") as server:
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
def small(bundles: Bundles) -> Iterator[LocalServer]:
    """A server of narrow limits."""
    with local_server([bundles["skips"]], "--max-body-mb", "0.1") as server:
        yield server


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_once(tmp_path_factory, "slow", lambda folder: export_slow(folder / "slow.stagepack", Slow()))
    return folder / "slow.stagepack"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A server of a model repository, whose clients load models. Each test has models of its own, beside two that are always there."""
    folder = tmp_path_factory.mktemp("models")
    export_scale(folder / "scale" / "1", 1.0)
    export_counter(folder / "counter" / "1", 1.0)
    updates = tmp_path_factory.mktemp("updates")
    export_scale(updates / "next", 1.0)  # the same weights: other tests of the model go on
    options = ("--load-model", "*", "--sequence-idle-s", "1.5", "--update-folder", str(updates))
    with repository_server(folder, *options) as repository:
        yield repository
