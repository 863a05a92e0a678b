"""Health and metrics, which the load of a server neither delays nor is delayed by."""

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest

import stagepack
from stagepack_serving.server.rest_pages import SharedPage, metrics_page
from stagepack_serving.server.server import _raise_file_limit
from tests.serve.servers import get
from tests.waiting import wait_until
from tools.fork_server import ForkedCommand

# A token is checked in the event loop: one of these keeps it busy.
SERVER = """
import sys, time

import stagepack
from stagepack_serving.server import server

server._LIVE_SECONDS = 1.0
stagepack.serve(
    {"scale": stagepack.load(sys.argv[1])},
    http_port=0,
    grpc_port=0,
    operator_port=0,
    check_token=lambda token: time.sleep(4),
    on_listening=lambda addresses: print(addresses.http_port, addresses.operator_port, flush=True),
)
"""


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The port for REST and that of the operator."""
    out = tmp_path_factory.mktemp("operator") / "scale.stagepack"
    stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=out, stages=1)
    (script := out.with_name("server.py")).write_text(SERVER)
    process = ForkedCommand(str(out), script=script)
    with contextlib.closing(process.stdout):
        http_port, operator_port = map(int, process.stdout.readline().split())
        yield http_port, operator_port
        process.kill()
        process.wait()


def test_operator_is_answered_while_the_event_loop_is_busy(ports: tuple[int, int]) -> None:
    http_port, operator_port = ports
    assert get(operator_port, "/v2/health/live")[:2] == (200, "")
    request = threading.Thread(target=get, args=(http_port, "/v2", {"Authorization": "Bearer some-token"}))
    request.start()
    wait_until(lambda: get(operator_port, "/v2/health/live")[0] == 503)
    assert get(operator_port, "/v2/health/ready")[0] == 200
    status, page, _ = get(operator_port)
    assert (status, "stagepack_model_info" in page) == (200, True)
    assert request.is_alive()  # it has waited for nothing
    wait_until(lambda: get(operator_port, "/v2/health/live")[0] == 200)


@pytest.mark.parametrize("path", ["/v2", "/v2/models/scale", "/openapi.json", "/v2/repository/index", "/v2/logging"])
def test_operator_port_has_health_and_metrics_alone(ports: tuple[int, int], path: str) -> None:
    assert get(ports[1], path)[0] == 404


def test_page_is_made_once_for_all_who_ask_meanwhile() -> None:
    making_count = 0

    def make() -> bytes:
        nonlocal making_count
        making_count += 1
        time.sleep(0.05)
        return str(making_count).encode()

    async def ask() -> list[bytes]:
        page = SharedPage(make)
        first_asker = asyncio.create_task(page.content())
        await asyncio.sleep(0.02)  # it is being made
        others = await asyncio.gather(*[page.content() for _ in range(20)])
        return [await first_asker, *others]

    # The first page is older than what the others ask.
    assert asyncio.run(ask()) == [b"1", *[b"2"] * 20]


def test_page_that_cannot_be_made_is_made_again() -> None:
    pages = [b"page", b""]

    def make() -> bytes:
        if page := pages.pop():
            return page
        raise ValueError("no page")

    async def ask() -> bytes:
        page = SharedPage(make)
        with pytest.raises(ValueError, match="no page"):
            await page.content()
        return await page.content()

    assert asyncio.run(ask()) == b"page"


def test_metrics_with_pauses_are_those_of_the_library() -> None:
    registry = CollectorRegistry()
    counter = Counter("answers", "Answers.", ["model"], registry=registry)
    for model_index in range(100):
        counter.labels(f"model{model_index}").inc(model_index)
    assert metrics_page(registry) == generate_latest(registry)


def test_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit - 10, hard_limit))
        _raise_file_limit(soft_limit - 5)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft_limit - 5, hard_limit)
        _raise_file_limit(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft_limit - 5, hard_limit)
        _raise_file_limit(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
