"""A model whose loop never ends, served beside another one: its processes are ended and started again, and the other one answers."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch._higher_order_ops import while_loop

import stagepack
from tests.serve.servers import Server, post, stagepack_server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]

DEADLINE_SECONDS = 3.0


class Loop(torch.nn.Module):
    """Adds `step` until 100 is reached: without an end for a step of 0."""

    def forward(self, start: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda x, s: x.sum() < 100, lambda x, s: (x + s, s.clone()), (start, step))[0]


def ask(server: Server, model: str, **inputs: float) -> tuple[int, object]:
    body = {
        "inputs": [
            {"name": input_name, "shape": [2], "datatype": "FP32", "data": [value, value]}
            for input_name, value in inputs.items()
        ]
    }
    status, answer, _ = post(server.http, f"/v2/models/{model}/infer", json.dumps(body))
    return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]


def test_an_endless_loop_is_ended_and_stops_no_other_model(tmp_path: Path) -> None:
    loop = stagepack.export(Loop(), (torch.zeros(2), torch.ones(2)), out=tmp_path / "loop", stages=1)
    linear = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(2),), out=tmp_path / "linear", stages=1)
    options = ["--processes", "1", "--deadline-s", str(DEADLINE_SECONDS)]
    with stagepack_server([loop.path, linear.path], *options) as server:
        assert ask(server, "loop", start=0.0, step=1.0) == (200, [50.0, 50.0])
        expected = ask(server, "linear", input=1.0)
        assert expected[0] == 200
        assert ask(server, "loop", start=0.0, step=0.0) == (504, "loop: no answer before the deadline")
        statuses = []
        for _ in range(200):
            assert ask(server, "linear", input=1.0) == expected
            statuses.append(ask(server, "loop", start=0.0, step=1.0)[0])
            if statuses[-1] == 200:
                break
            time.sleep(0.2)
        assert set(statuses[:-1]) <= {503, 504}
        assert ask(server, "loop", start=0.0, step=1.0) == (200, [50.0, 50.0])
