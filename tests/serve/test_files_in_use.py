"""A server answers as before when the weight files of its models are cut short, overwritten, replaced or removed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from tests.serve.servers import Client, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")

X = numpy.arange(64, dtype="float32").reshape(1, 64)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.open("w").close(),
    "overwritten": _overwrite,
    "replaced": _replace,
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("option", ["--no-copy", pytest.param("--copy", marks=pytest.mark.slow)])
def test_a_server_answers_as_before_when_its_files_are_changed(option: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        original = stagepack.export(torch.nn.Linear(64, 64), (torch.from_numpy(X),), out=folder / "original")
        paths = {model: shutil.copytree(original.path, folder / model) for model in CHANGES}
        server = stack.enter_context(stagepack_server(list(paths.values()), option))
        client = stack.enter_context(contextlib.closing(Client("http", server)))
        weight_file = original.stages[0].weights[0]
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert (str(paths["cut"] / weight_file) in maps) == (option == "--no-copy")
        before = {model: client.ask(model, {"input": X}) for model in CHANGES}
        assert all(before.values())
        for model, change in CHANGES.items():
            change(paths[model] / weight_file)
        for model, answer in before.items():
            numpy.testing.assert_equal(client.ask(model, {"input": X}), answer)
        assert server.stop() == 0
