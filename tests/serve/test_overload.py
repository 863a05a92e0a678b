"""At three times the load that a model can take, most of its capacity answers clients in time."""

import asyncio
import http.client
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

import stagepack
from tests.serve.servers import Server, stagepack_server
from tests.serve.test_serve import metrics
from tools.benchmark_models import llama

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.slow]
ROWS = 6
# Eight texts a request.
TEXTS_REQUEST = {"model": "decoder", "prompt": [3, 4, 5, 6], "max_tokens": 48, "temperature": 0, "n": 8}


class Products(torch.nn.Module):
    """Takes about 10 ms for each row on a core."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) * torch.linspace(0.5, 1, 96).unsqueeze(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean(1)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("products") / "products.stagepack"
    shapes = {"x": {0: torch.export.Dim("rows", max=64)}}
    stagepack.export(Products().eval(), (torch.ones(2, 1024),), out=path, stages=4, dynamic_shapes=shapes)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": 6, "hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 4, "vocab_size": 1000}
    model = llama(**sizes, max_position_embeddings=64, eos_token_id=None)
    path = tmp_path_factory.mktemp("decoder") / "decoder.stagepack"
    stagepack.export(model, generate=64, generate_batch=ROWS, out=path, stages=2)
    return path


PRODUCTS = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1024], "data": [0.5] * 1024}]}
TEXT = {"model": "decoder", "prompt": [1, 2, 3, 4], "max_tokens": 48}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Clients that each ask again when they have an answer, or after `deadline` seconds."""

    path: str = "/v2/models/products/infer"
    body: Mapping[str, Any] = field(default_factory=lambda: PRODUCTS)
    clients: int = 16
    seconds: float = 6
    warmup: float = 3
    deadline: float = 60
    obeys_retry_after: bool = True

    def goodput(self, server: Server) -> tuple[float, set[str]]:
        """Answers a second that come within the deadline, and what came to the clients: statuses, or "timed out"."""
        return asyncio.run(self._goodput(f"http://127.0.0.1:{server.http}{self.path}"))

    async def _goodput(self, url: str) -> tuple[float, set[str]]:
        outcomes: Counter[str] = Counter()
        start = time.monotonic() + self.warmup
        timeout = aiohttp.ClientTimeout(self.deadline)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> None:
                while (now := time.monotonic()) < start + self.seconds:
                    pause = 0.0
                    try:
                        async with session.post(url, json=self.body) as answer:
                            await answer.read()
                    except TimeoutError:
                        outcome = "timed out"
                    else:
                        outcome = str(answer.status)
                        if answer.status != 200 and self.obeys_retry_after:
                            pause = float(answer.headers["Retry-After"])
                    outcomes[outcome] += now >= start
                    await asyncio.sleep(pause)

            await asyncio.gather(*(ask() for _ in range(self.clients)))
        return outcomes["200"] / self.seconds, {outcome for outcome, count in outcomes.items() if count}


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_most_answers_are_in_time(products: Path, options: tuple[str, ...]) -> None:
    with stagepack_server([products], *options) as server:
        check_goodput(server, Load())


def test_clients_that_ask_again_at_once_leave_most_of_the_capacity(products: Path) -> None:
    with stagepack_server([products]) as server:
        capacity, _ = Load().goodput(server)
        clients = round(3 * capacity)
        goodput, _ = Load(clients=clients, seconds=12, warmup=4, deadline=1, obeys_retry_after=False).goodput(server)
        assert goodput > 0.5 * capacity


def test_most_texts_are_in_time(decoder: Path) -> None:
    with stagepack_server([decoder]) as server:
        check_goodput(server, Load(path="/v1/completions", body=TEXT))


def check_goodput(server: Server, load: Load) -> None:
    """Each client waits for a second, and asks again."""
    capacity, _ = load.goodput(server)
    overload = replace(load, clients=round(3 * capacity), seconds=12, warmup=4, deadline=1)
    goodput, outcomes = overload.goodput(server)
    assert goodput > 0.6 * capacity
    assert outcomes <= {"200", "503", "timed out"}


def test_most_tokens_that_are_generated_are_in_answers(decoder: Path) -> None:
    """Each request has more texts than there are rows; its client gives it up without having said when, and asks again at once."""
    with stagepack_server([decoder]) as server:
        with ThreadPoolExecutor(ROWS) as clients:
            start_time = time.monotonic()
            assert sum(clients.map(lambda _: answered_tokens(server, 60), range(2 * ROWS))) == 2 * ROWS * 8 * 48
        client_seconds = (time.monotonic() - start_time) / 2  # in which six requests can be answered
        before = metrics(server)["stagepack_generated_tokens_total", "decoder"]
        end_time = time.monotonic() + 60

        def ask_until_end(_: int) -> int:
            token_count = 0
            while time.monotonic() < end_time:
                token_count += answered_tokens(server, client_seconds)
            return token_count

        with ThreadPoolExecutor(3 * ROWS) as clients:
            answered = sum(clients.map(ask_until_end, range(3 * ROWS)))
        generated = metrics(server)["stagepack_generated_tokens_total", "decoder"] - before
    message = "%.3f of %d tokens are in answers, to clients who wait for %.2f s"
    logging.getLogger(__name__).info(message, answered / generated, generated, client_seconds)
    assert answered > 0.9 * generated


def answered_tokens(server: Server, client_seconds: float) -> int:
    """The tokens of the answer to a request, none if it is refused or given up; then wait as the server says."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=client_seconds)
    try:
        connection.request("POST", "/v1/completions", json.dumps(TEXTS_REQUEST))
        response = connection.getresponse()
        answer = json.loads(response.read())
    except TimeoutError:
        return 0
    finally:
        connection.close()
    if response.status == 200:
        count: int = answer["usage"]["completion_tokens"]
        return count
    assert response.status == 503, answer
    time.sleep(float(response.headers["retry-after"]))
    return 0
