"""Files of a bundle that are opened: more than a process may open at once, and those that become links meanwhile."""

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
from stagepack.format.weights import read_weight_header
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
    open_weight_files(bundle, names, verify=True, copy=True)
    with open_file_limit(80):
        assert len(open_weight_files(bundle, names, verify=True, copy=True)) == 120


def test_too_many_open_files_are_no_damage(editor: BundleEditor) -> None:
    bundle = stagepack.open(editor.path)
    bundle.verify()
    roads: list[Callable[[], Any]] = [
        bundle.verify,
        lambda: bundle.graph(0),
        lambda: bundle.tensors(0, Graph()),
        lambda: stagepack.open(editor.path),
        lambda: open_weight_files(bundle, ["stage-1.safetensors"], verify=True, copy=True),
    ]
    for road in roads:
        with (
            open_file_limit(0),
            pytest.raises(StagepackError, match=r"Too many open files: raise .*ulimit -n") as caught,
        ):
            road()
        assert type(caught.value) is StagepackError


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch, editor: BundleEditor, sound: Path) -> Callable[[str], None]:
    """Puts a link in the place of a file of the bundle, right after it was seen to be a plain file."""

    def arm(file_name: str) -> None:
        is_symlink = Path.is_symlink

        def seen(path: Path) -> bool:
            result = is_symlink(path)
            if path.name == file_name and not result:
                path.unlink()
                path.symlink_to(sound / file_name)
            return result

        monkeypatch.setattr(Path, "is_symlink", seen)

    return arm


def test_a_graph_that_becomes_a_link_is_not_read(swap: Callable[[str], None], editor: BundleEditor) -> None:
    bundle = stagepack.open(editor.path)
    swap("stage-0.msgpack")
    with pytest.raises(DigestError, match=r"stage-0.msgpack: .*symbolic links \[D1\]"):
        bundle.graph(0)


def test_a_manifest_that_becomes_a_link_is_not_read(
    swap: Callable[[str], None], editor: BundleEditor, sound: Path
) -> None:
    editor.edit_manifest(lambda fields: fields.update(device="other"))
    swap("manifest.json")
    assert stagepack.open(editor.path).manifest.device == "other"


def test_an_example_that_becomes_a_link_is_not_read(editor: BundleEditor, sound: Path) -> None:
    class Changing(stagepack.Bundle):
        def digest_problems(self, *arguments: Any) -> Any:
            problems = super().digest_problems(*arguments)
            (self.path / "example.safetensors").unlink()
            (self.path / "example.safetensors").symlink_to(sound / "example.safetensors")
            return problems

    with pytest.raises(DigestError, match=r"example.safetensors: not a plain file"):
        Changing(editor.path).verify()
    with pytest.raises(OSError, match="symbolic links"):
        read_weight_header(editor / "example.safetensors")
