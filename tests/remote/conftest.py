"""Bundles, and servers that have them."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

import stagepack
from stagepack.remote import download, http_store
from tests.hostile.tiny import write_tiny
from tests.remote.http_server import HttpServer
from tests.remote.hub_server import TOKEN, HubServer


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles tiny.stagepack, of small files, and large.stagepack, whose weight files have two chunks each."""
    folder = tmp_path_factory.mktemp("served")
    write_tiny(folder / "tiny.stagepack")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2100, 2100), torch.nn.Linear(2100, 2100)).eval()
    stagepack.export(model, (torch.ones(1, 2100),), out=folder / "large.stagepack", split_at=["1"])
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and tries without long pauses."""
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(http_store, "STALL_SECONDS", 0.5)
    return tmp_path / "cache"


@pytest.fixture
def server(served: Path, cache: Path) -> Iterator[HttpServer]:
    """A server of the folder, which behaves until a test changes that."""
    with HttpServer(served) as http_server:
        yield http_server


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub, with the user's token."""
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub.constants, "HF_HUB_DISABLE_XET", True
        )  # its protocol has servers of its own
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
