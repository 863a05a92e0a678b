"""At three times the load that a model can take, most of its capacity answers clients in time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from tests.hostile.attack import run
from tests.serve.servers import Server, stagepack_server
from tools.benchmark_models import llama

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.slow]


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
    stagepack.export(model, generate=64, generate_batch=4, out=path, stages=2)
    return path


def measure(server: Server, *options: str) -> Mapping[str, Any]:
    """What `stagepack bench` says."""
    result = run("bench", f"http://127.0.0.1:{server.http}", "--json", *options)
    assert result.exit_code == 0, result.output
    facts: Mapping[str, Any] = json.loads(result.stdout)
    return facts


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_most_answers_are_in_time(products: Path, options: tuple[str, ...]) -> None:
    with stagepack_server([products], *options) as server:
        check_goodput(server)


def test_clients_that_ask_again_at_once_leave_most_of_the_capacity(products: Path) -> None:
    with stagepack_server([products]) as server:
        capacity = measure(server, "--clients", "16", "--seconds", "6", "--warmup-s", "3")["goodput"]
        clients = ("--clients", str(round(3 * capacity)), "--deadline-ms", "1000", "--timeout-s", "1")
        overloaded = measure(server, *clients, "--seconds", "12", "--warmup-s", "4")
        assert overloaded["goodput"] > 0.5 * capacity


def test_most_texts_are_in_time(decoder: Path) -> None:
    with stagepack_server([decoder]) as server:
        check_goodput(server, "--api", "completions", "--prompt-tokens", "4", "--output-tokens", "48")


def check_goodput(server: Server, *request_options: str) -> None:
    """Each client waits for a second, and asks again."""
    capacity = measure(server, "--clients", "16", "--seconds", "6", "--warmup-s", "3", *request_options)["goodput"]
    clients = ("--clients", str(round(3 * capacity)), "--deadline-ms", "1000", "--retry", "1000000")
    overloaded = measure(server, *clients, "--seconds", "12", "--warmup-s", "4", *request_options)
    assert overloaded["goodput"] > 0.6 * capacity
    assert set(overloaded["outcomes"]) <= {"200", "503", "timed out"}
