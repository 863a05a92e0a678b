"""A request without rows, which bundles allow by default, is answered, and the server goes on."""

import contextlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.export import Dim

import stagepack
from tests.serve.servers import Client, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")


class Recurrent(torch.nn.Module):
    """An LSTM, which ends the process of ONNX Runtime if it gets no rows; the sum over no rows has elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        states = self.lstm(x)[0]
        return states, states.sum(0)


def test_an_empty_batch_is_answered_and_ends_no_server_with_onnx_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, path = Recurrent().eval(), tmp_path / "recurrent.stagepack"
    dims = ({0: Dim("rows", min=0, max=8)},)
    stagepack.export(net, (torch.randn(2, 5, 4),), out=path, dynamic_shapes=dims, onnx=True)
    with stagepack_server([path], "--runtime", "onnxruntime") as server:
        for protocol in ("http", "grpc"):
            with contextlib.closing(Client(protocol, server)) as client:
                for rows in (0, 3, 0):
                    x = torch.randn(rows, 5, 4)
                    answer = list(client.ask("recurrent", {"x": x.numpy()}).values())
                    with torch.no_grad():
                        wanted = net(x)
                    for mine, other in zip(answer, wanted, strict=True):
                        assert mine.shape == tuple(other.shape)
                        assert numpy.allclose(mine, other.numpy(), atol=1e-6)
