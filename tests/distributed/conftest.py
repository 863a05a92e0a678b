"""Bundles and connections, each made once for the tests of a module."""

import threading
from collections.abc import Iterator

import pytest

from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, open_store
from tests.distributed.bundles import export_counting, export_layers
from tests.distributed.connections import Connect, connecting


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_layers(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_counting(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def groups() -> tuple[ProcessGroup, ProcessGroup]:
    """Two ends of one connection."""
    store = open_store(LOOPBACK)
    found: list[ProcessGroup] = []
    other_store = open_store(LOOPBACK, store.port)  # a client of its own: one that waits lets no other thread in
    other_end = threading.Thread(target=lambda: found.append(ProcessGroup(other_store, 1, 2, address=LOOPBACK)))
    other_end.start()
    first = ProcessGroup(store, 0, 2, address=LOOPBACK)
    other_end.join()
    return first, found[0]


@pytest.fixture(params=["gloo", "link", "gloo-devices", "link-devices"])
def connect(request: pytest.FixtureRequest, groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Connect]:
    """Connects routes, between machines or on one, by the host or from device to device."""
    is_local, joins_devices = request.param.startswith("link"), request.param.endswith("devices")
    with connecting(groups, is_local=is_local, joins_devices=joins_devices) as connect_route:
        yield connect_route


@pytest.fixture
def link(groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Connect]:
    """Connects routes on one machine."""
    with connecting(groups, is_local=True) as connect_route:
        yield connect_route
