"""Models of which there are several versions, and a server of a model repository."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import stagepack
from tests.modules import module_of
from tests.serve.local_server import local_server
from tests.serve.servers import AnyServer, Client, post

X = numpy.ones((2, 3), "float32")


class Counter(torch.nn.Module):
    """Adds a step to its state in each call."""

    total: torch.Tensor

    def __init__(self, step: float) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.step = torch.nn.Parameter(torch.tensor(step))

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x * self.step)
        return {"sum": self.total + 0}


def export_scale(path: Path, factor: float) -> Path:
    """A version of the model without state: its answers say which one it is."""
    model = module_of(lambda self, x: {"y": x * self.factor}, factor=torch.nn.Parameter(torch.tensor(factor)))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    stagepack.export(model, (torch.ones(2, 3),), out=path, stages=1, dynamic_shapes={"x": rows}, overwrite=True)
    return path


def export_counter(path: Path, step: float) -> Path:
    """A version of the model with state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stagepack.export(Counter(step), (torch.ones(3),), out=path, stages=1, overwrite=True)
    return path


@dataclass(frozen=True)
class Repository:
    """A server, and the folder of its models. Each test has models of its own."""

    server: AnyServer
    folder: Path

    def index(self, model_name: str) -> dict[str, dict[str, str]]:
        """The entries of a model in the index, by version."""
        _, entries, _ = post(self.server.http, "/v2/repository/index", b"")
        return {entry["version"]: entry for entry in entries if entry["name"] == model_name}

    def states(self, model_name: str) -> dict[str, str]:
        return {version: entry["state"] for version, entry in self.index(model_name).items()}


@contextlib.contextmanager
def repository_server(folder: Path, *options: str, serve: Any = local_server) -> Iterator[Repository]:
    """A server whose clients load models of a folder."""
    control = ("--model-repository", str(folder), "--model-control", "explicit")
    with serve([], *control, *options) as server:
        yield Repository(server, folder)


def factor_of(client: Client, model_name: str, **options: Any) -> float:
    """The factor of the version that answers."""
    return float(client.ask(model_name, {"x": X}, outputs=["y"], **options)["y"][0, 0])


def count(client: Client, model_name: str, sequence_id: int, **options: Any) -> float:
    """The sum after the next request of a sequence."""
    inputs = {"x": numpy.ones(3, "float32")}
    return float(client.ask(model_name, inputs, outputs=["sum"], sequence_id=sequence_id, **options)["sum"][0])
