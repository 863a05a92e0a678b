"""`stagepack serve --max-value-bytes`: a value inside the model that would be too large is refused before anything is computed."""

import json
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from tests.serve.generating_model import export_decoder
from tests.serve.servers import STAGEPACK, Server, post, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")


class Pairs(torch.nn.Module):
    """[rows] -> [rows]; inside is [rows, rows] of float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * x[None]).sum(dim=1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    shapes = {"x": {0: torch.export.Dim("rows", min=1, max=1 << 20)}}
    stagepack.export(Pairs(), (torch.ones(10),), dynamic_shapes=shapes, out=folder / "pairs.stagepack")
    stagepack.export(Pairs(), (torch.ones(600),), out=folder / "large.stagepack")
    return folder


def ask(server: Server, rows: int) -> tuple[int, dict[str, object]]:
    x = {"name": "x", "shape": [rows], "datatype": "FP32", "data": numpy.ones(rows).tolist()}
    status, answer, _ = post(server.http, "/v2/models/pairs/infer", json.dumps({"inputs": [x]}))
    return status, answer


def test_requests_at_which_a_value_is_too_large(pairs: Path) -> None:
    with stagepack_server([pairs / "pairs.stagepack"], "--max-value-bytes", "1MB") as server:
        assert ask(server, 500)[0] == 200  # 500 * 500 * 4 bytes
        status, answer = ask(server, 501)
        assert status == 400
        assert "expected at most 1,000,000 bytes for a value, found 1,004,004" in str(answer["error"])
        assert ask(server, 500)[0] == 200


def test_bundles_that_are_too_large_at_any_sizes_or_in_their_example(pairs: Path) -> None:
    advice = "the example of the bundle exceeds --max-value-bytes: raise it"
    for name, limit, says in (("large", "1MB", "allow larger values"), ("pairs", "399", advice)):
        command = [STAGEPACK, "serve", str(pairs / f"{name}.stagepack"), "--max-value-bytes", limit]
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert completed.returncode == 1
        assert "bytes for a value, found" in completed.stderr
        assert says in completed.stderr


class Products(torch.nn.Module):
    """[rows, 8] -> [rows, 8]; inside are 256 bytes for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * x[:, None]).sum(dim=1)


def test_the_limit_is_that_of_each_request_and_not_of_the_batch_that_they_are_joined_to(tmp_path: Path) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=1, max=64)}}
    stagepack.export(Products(), (torch.rand(3, 8),), dynamic_shapes=shapes, out=tmp_path / "products.stagepack")
    with stagepack_server([tmp_path / "products.stagepack"], "--max-value-bytes", "1024") as server:
        model = server.facts["models"][0]
        assert (model["batch"], model["alone"]) == (32, "")
        for rows, status in ((4, 200), (5, 400)):
            x = {"name": "x", "shape": [rows, 8], "datatype": "FP32", "data": [0.5] * (rows * 8)}
            assert post(server.http, "/v2/models/products/infer", json.dumps({"inputs": [x]}))[0] == status


def test_generation_has_the_same_limit(tmp_path: Path) -> None:
    writer = export_decoder(tmp_path)
    with stagepack_server([writer], "--max-value-bytes", "13000") as server:
        for length, status in ((10, 200), (60, 400)):
            requests = {
                "/v2/models/writer/generate": {"input_ids": [1] * length, "max_tokens": 3},
                "/v1/completions": {"model": "writer", "prompt": [1] * length, "max_tokens": 3},
            }
            for path, body in requests.items():
                answered, answer, _ = post(server.http, path, json.dumps(body))
                assert answered == status, answer
                assert status == 200 or "expected at most 13,000 bytes for a value" in json.dumps(answer)
