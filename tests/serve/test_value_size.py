"""`stagepack serve --max-value-bytes`: a value inside the model that would be too large is refused before anything is computed."""

import json
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
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
    for name, limit in (("large", "1MB"), ("pairs", "399")):
        command = [STAGEPACK, "serve", str(pairs / f"{name}.stagepack"), "--max-value-bytes", limit]
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert completed.returncode == 1
        assert "bytes for a value, found" in completed.stderr
