"""`stagepack serve --device`: answers of batches, and a server whose GPU is lost."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack

pytest.importorskip("grpc", reason="the server needs the packages of the extra serve", exc_type=ImportError)

from tests.gpu.test_gpu_failures import Lookup
from tests.serve import servers

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("serve")]


def request(value: list[Any], datatype: str, shape: list[int], name: str) -> str:
    return json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": value}]})


@torch.no_grad()
def test_requests_are_answered_in_batches(
    device: torch.device, tmp_path: Path, module_as_command: tuple[str, str]
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).eval()
    bundle = stagepack.export(model, inputs="input=float32[rows=1..64,16]", out=tmp_path / "net.stagepack", stages=2)
    batches = [torch.randn(1 + number % 3, 16) for number in range(12)]
    options = ("--device", str(device), "--max-batch", "8", "--max-delay-ms", "50")
    with servers.stagepack_server([bundle.path], *options, prefix=module_as_command) as server:
        assert server.facts["models"][0]["devices"] == [str(device)]

        def ask(x: torch.Tensor) -> torch.Tensor:
            body = request(x.flatten().tolist(), "FP32", list(x.shape), bundle.edges[0].name)
            status, answer, _ = servers.post(server.http, "/v2/models/net/infer", body)
            assert status == 200, answer
            return torch.tensor(answer["outputs"][0]["data"]).reshape(len(x), 4)

        with ThreadPoolExecutor(6) as pool:
            for x, found in zip(batches, pool.map(ask, batches), strict=True):
                torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
        assert server.stop() == 0


def test_a_server_whose_device_is_lost_ends(
    device: torch.device, tmp_path: Path, module_as_command: tuple[str, str]
) -> None:
    """On the CPU an index out of range fails its own request only."""
    bundle = stagepack.export(Lookup(), (torch.tensor([1]),), out=tmp_path / "net.stagepack", split_at=["last"])
    options = ("--device", str(device), "--linger-s", "0")
    with servers.stagepack_server([bundle.path], *options, prefix=module_as_command) as server:
        statuses = [
            servers.post(server.http, "/v2/models/net/infer", request([index], "INT64", [1], bundle.edges[0].name))[0]
            for index in (3, 99)
        ]
        if device.type == "cuda":
            assert statuses == [200, 503]
            assert server.process.wait(timeout=60) == 1
        else:
            assert statuses == [200, 400]
            assert server.stop() == 0
