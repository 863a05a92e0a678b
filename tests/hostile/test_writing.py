"""Whatever goes wrong while a bundle is written, the name holds the old bundle, or nothing, or the new one, and says so."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import CaptureError, CutError, OutputExistsError, WriteError
from stagepack.format import output_file
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails
from tests.hostile.rewrite import contents
from tests.hostile.tiny import tiny, write_tiny
from tools.fork_server import run_forked

REPOSITORY = Path(__file__).parents[2]


class Unreached(torch.nn.Module):
    """A model that must not be asked: its output cannot be written anyway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fail the test."""
        raise AssertionError("the model was captured before the output was checked")


def export(out: Path, *, overwrite: bool = False) -> None:
    """Ask for an export whose output is checked first."""
    stagepack.export(Unreached(), (torch.zeros(1),), out=out, overwrite=overwrite)


def test_what_exists_is_not_overwritten_unasked(editor: BundleEditor) -> None:
    before = contents(editor.path)
    with pytest.raises(
        OutputExistsError,
        match=r"already exists: choose another name, or overwrite it \(--overwrite; in Python overwrite=True\)",
    ):
        export(editor.path)
    command_fails("export", "nowhere.py:model", "-o", str(editor.path), says="already exists")
    assert contents(editor.path) == before


def folder_of_the_user(path: Path, **manifest: str) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    if manifest:
        (path / "manifest.json").write_text(json.dumps(manifest))


def link_to_a_bundle(path: Path) -> None:
    write_tiny(path.with_name("real.stagepack"))
    path.symlink_to("real.stagepack")


NO_BUNDLES: dict[str, Callable[[Path], object]] = {
    "empty": Path.mkdir,
    "folder": folder_of_the_user,
    "web app": lambda path: folder_of_the_user(path, name="app", format="stagepack"),
    "file": lambda path: path.write_text("years of work"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link": link_to_a_bundle,
}


def tree(folder: Path) -> list[tuple[str, bytes | str | None]]:
    """All of a folder, links as links."""
    return sorted(
        (str(path), os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    )


@pytest.mark.parametrize("make", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_overwriting_replaces_bundles_only(make: Callable[[Path], object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    before = tree(tmp_path)
    says = "is a symbolic link to" if out.is_symlink() else "exists and is not a bundle, so it is not overwritten"
    with pytest.raises(OutputExistsError, match=f"{says}.*choose another name"):
        export(out, overwrite=True)
    command_fails("export", "nowhere.py:model", "-o", str(out), "--overwrite", says=says)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("damage", [lambda _: None, lambda editor: editor.truncate("manifest.json", 40)])
def test_overwriting_replaces_a_bundle_whole_if_it_is_damaged_or_not(
    damage: Callable[[BundleEditor], None], editor: BundleEditor, sound: Path
) -> None:
    editor.write_file("old.json", b"{}")
    damage(editor)
    if b"old.json" not in (editor.path / "manifest.json").read_bytes():
        with pytest.raises(OutputExistsError, match=r"would be lost: old.json: move"):
            write_tiny(editor.path, overwrite=True)
        (editor.path / "old.json").unlink()
    write_tiny(editor.path, overwrite=True)
    assert contents(editor.path) == contents(sound)
    assert list(editor.path.parent.iterdir()) == [editor.path]


@pytest.mark.parametrize("out", ["missing/m.stagepack", "/proc/m.stagepack", "x" * 250])
def test_where_nothing_can_be_written_it_is_said_and_nothing_is_left(out: str, tmp_path: Path) -> None:
    model, inputs = tiny()
    path = tmp_path / out
    with pytest.raises(WriteError, match=r"expected the folder .*missing to exist|cannot write there: "):
        stagepack.export(model, tuple(inputs.args), out=path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_the_old_bundle(editor: BundleEditor) -> None:
    before = contents(editor.path)
    model, inputs = tiny()
    with pytest.raises(CutError):
        stagepack.export(model, tuple(inputs.args), out=editor.path, split_at=["nothing"], overwrite=True)
    with pytest.raises(CaptureError):
        stagepack.export(model, (torch.zeros(1, 1),), out=editor.path, overwrite=True)
    assert contents(editor.path) == before
    assert list(editor.path.parent.iterdir()) == [editor.path]


def test_a_bundle_that_is_overwritten_is_there_at_each_moment(editor: BundleEditor, sound: Path) -> None:
    missing, is_done = [], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            missing.append(not (editor.path / "manifest.json").exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(10):
        overwrite_with(sound, editor.path)
    is_done.set()
    watcher.join()
    assert len(missing) > 100
    assert not any(missing)
    assert contents(editor.path) == contents(sound)
    assert list(editor.path.parent.iterdir()) == [editor.path]


def test_a_folder_is_overwritten_where_two_cannot_be_exchanged(
    editor: BundleEditor, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_file, "exchange_paths", lambda *_: False)
    editor.write_file("old.json", b"{}")
    overwrite_with(sound, editor.path)
    assert contents(editor.path) == contents(sound)
    assert list(editor.path.parent.iterdir()) == [editor.path]


def overwrite_with(sound: Path, out: Path) -> None:
    bundle = Bundle(sound)
    with BundleWriter(out, overwrite=True) as bundle_writer:
        for name, entry in bundle.files.items():
            bundle_writer.link_file(sound / name, entry)
        bundle_writer.finish(bundle.manifest)


def write_half(out: Path, error: type[BaseException]) -> None:
    with BundleWriter(out, overwrite=False) as writer:
        writer.write_file("stage-0.msgpack", [b"half"])
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_a_writer_that_is_left_early_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error):
        write_half(tmp_path / "m.stagepack", error)
    assert list(tmp_path.iterdir()) == []


def write_while_another_takes_the_name(sound: Path, out: Path, *, overwrite: bool) -> None:
    bundle = Bundle(sound)
    with BundleWriter(out, overwrite=overwrite) as writer:
        for name in bundle.files:
            writer.write_file(name, [(sound / name).read_bytes()])
        folder_of_the_user(out)
        writer.finish(bundle.manifest)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_takes_the_name_meanwhile_is_kept(overwrite: bool, sound: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.stagepack"
    with pytest.raises(OutputExistsError):
        write_while_another_takes_the_name(sound, out, overwrite=overwrite)
    assert contents(out) == {"thesis.tex": b"years of work"}
    assert list(tmp_path.iterdir()) == [out]


def rewrite(mode: str, sound: Path, folder: Path, *before: str) -> list[dict[str, Any]]:
    """Run a mode of ``rewrite.py`` in a process of its own."""
    script = Path(__file__).with_name("rewrite.py")
    found = subprocess.run(
        [*before, sys.executable, str(script), mode, str(sound), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.process
def test_a_writer_killed_at_any_moment_leaves_the_old_or_nothing_or_the_new(sound: Path, tmp_path: Path) -> None:
    *killed, last = rewrite("killed", sound, tmp_path / "work")
    assert len(killed) > 40
    assert {moment["status"] for moment in killed} == {-9}
    assert {moment["holds"] for moment in killed} <= {"old", "nothing", "new"}
    assert {moment["holds"] for moment in killed} >= {"old", "new"}
    assert all(moment["old_kept_beside"] for moment in killed if moment["holds"] == "nothing")
    assert (last["status"], last["holds"], last["beside"]) == (0, "new", [])


@pytest.mark.process
def test_a_writer_interrupted_at_any_moment_leaves_the_old_or_the_new(sound: Path, tmp_path: Path) -> None:
    *interrupted, last = rewrite("interrupted", sound, tmp_path / "work")
    assert len(interrupted) > 40
    assert {moment["status"] for moment in interrupted} == {3}
    assert {moment["holds"] for moment in interrupted} == {"old", "new"}
    assert all(not moment["beside"] for moment in interrupted if moment["holds"] == "old")
    assert (last["status"], last["holds"], last["beside"]) == (0, "new", [])


def check_out_of_room(found: list[dict[str, Any]], reason: str) -> None:
    """Each write either went well or left the old bundle, said why, and left nothing else."""
    assert {(moment["status"], moment["holds"]) for moment in found} == {(2, "old"), (0, "new")}
    assert all(moment["beside"] == [] for moment in found)
    for moment in found:
        if moment["status"]:
            assert moment["error"].endswith(f"m.stagepack: could not be written, nothing was changed: {reason}")


@pytest.mark.process
def test_files_that_may_not_grow_leave_the_old_bundle(sound: Path, tmp_path: Path) -> None:
    check_out_of_room(rewrite("limited", sound, tmp_path / "work"), "File too large")


@pytest.mark.process
def test_a_full_disk_leaves_the_old_bundle(sound: Path, tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=160k none "$0" && exec "$@"'
    disk = tmp_path / "disk"
    disk.mkdir()
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(disk)]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip(
            "a small disk needs unshare and mount in a user namespace of its own, which this machine does not allow"
        )
    check_out_of_room(rewrite("small_disk", sound, disk / "work", *own), "No space left on device")


# The command, where no file may have more than 200,000 bytes; a layer has 262,144.
EXPORT = """
import resource, sys, torch
from stagepack.cli import main

def model():
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), (torch.zeros(1, 256),)

if __name__ == "__main__":
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    main(["export", "model.py:model", "-o", sys.argv[1], "--overwrite"], prog_name="stagepack")
"""


@pytest.mark.process
def test_the_command_says_in_one_line_that_there_is_no_room(
    editor: BundleEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(EXPORT)
    before = contents(editor.path)
    monkeypatch.chdir(tmp_path)
    found = run_forked(editor.path.name, script=tmp_path / "model.py")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.splitlines() == [
        f"stagepack: {editor.path}: could not be written, nothing was changed: File too large"
    ]
    assert contents(editor.path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", editor.path.name}
