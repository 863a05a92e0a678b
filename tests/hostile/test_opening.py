"""Files of a bundle that are opened: more than a process may open at once, and one that becomes a pipe meanwhile."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.errors import DigestError, StagepackError
from stagepack.format.graph import Graph
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.weight_files import open_weight_files
from tests.bundle_editor import BundleEditor, weight_file


@contextlib.contextmanager
def open_file_limit(further: int) -> Iterator[None]:
    """This process can open so many further files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 2, limits[1]))
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                fillers.append(open_files.enter_context(Path(os.devnull).open()))
        highest = max(filler.fileno() for filler in fillers)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + further, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_files_are_verified_than_can_be_open(editor: BundleEditor) -> None:
    for number in range(120):
        editor.write_file(f"more-{number}.json", b"{}")
    bundle = stagepack.open(editor.path)
    bundle.verify()  # imports what it needs
    with open_file_limit(80):
        bundle.verify()


def test_more_weight_files_are_loaded_than_can_be_open(editor: BundleEditor) -> None:
    names = [f"more-{number}.safetensors" for number in range(120)]
    for name in names:
        editor.write_file(name, weight_file(b"{}", b""))
    bundle = stagepack.open(editor.path)
    open_weight_files(bundle, names, Loading(options=LoadOptions(copy=True)), verify=True)
    with open_file_limit(80):
        assert len(open_weight_files(bundle, names, Loading(options=LoadOptions(copy=True)), verify=True)) == 120


def test_too_many_open_files_are_no_damage(editor: BundleEditor) -> None:
    bundle = stagepack.open(editor.path)
    bundle.verify()
    roads: list[Callable[[], Any]] = [
        bundle.verify,
        lambda: bundle.graph(0),
        lambda: bundle.tensors(0, Graph()),
        lambda: stagepack.open(editor.path),
        lambda: open_weight_files(
            bundle, ["stage-1.safetensors"], Loading(options=LoadOptions(copy=True)), verify=True
        ),
    ]
    for road in roads:
        with (
            open_file_limit(0),
            pytest.raises(StagepackError, match=r"Too many open files: raise .*ulimit -n") as caught,
        ):
            road()
        assert type(caught.value) is StagepackError


def test_a_file_that_becomes_a_pipe_meanwhile_is_not_read(
    editor: BundleEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = stagepack.open(editor.path)
    path, actual_stat = editor / "stage-0.msgpack", os.stat
    file_status = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda at, **options: file_status if at == path else actual_stat(at, **options))
    with pytest.raises(DigestError, match=r"stage-0.msgpack: .*pipe \[D1\]"):
        bundle.graph(0)
