"""Files that the commands write: an existing one is replaced only with --overwrite, in one step, and none is put into a bundle."""

import filecmp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stagepack.errors import WriteError
from stagepack.format.output_file import check_output_file, output_file
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails, run

STAGEPACK = Path(sys.executable).with_name("stagepack")

# The file is the last argument.
WRITERS = [
    ["report", "BUNDLE", "-o"],
    ["profile", "BUNDLE", "--runs", "1", "-o"],
    ["plan", "BUNDLE", "-o"],
    ["load", "BUNDLE", "--outputs"],
    ["load", "BUNDLE", "--requests", "1", "--trace"],
]
SERVER = ["serve", "BUNDLE", "--processes", "2", "--trace"]


def arguments(writer: list[str], bundle: Path, out: Path) -> list[str]:
    return [str(bundle) if word == "BUNDLE" else word for word in writer] + [str(out)]


@pytest.mark.parametrize("writer", [*WRITERS, SERVER], ids=" ".join)
def test_a_file_is_replaced_only_if_asked(writer: list[str], sound: Path, tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    out.write_text("mine")
    link.symlink_to("nothing")
    says = r"already exists: choose another name, or replace the file \(--overwrite\)$"
    command_fails(*arguments(writer, sound, out), says=says)
    command_fails(*arguments(writer, sound, link), says=says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]
    assert out.read_text() == "mine"
    if writer != SERVER:
        out.chmod(0o640)
        result = run(*arguments(writer, sound, out), "--overwrite")
        assert result.exit_code == 0, result.output
        assert out.read_bytes() != b"mine"
        assert out.stat().st_mode & 0o777 == 0o640
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("writer", [*WRITERS, SERVER], ids=" ".join)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "new"])
def test_no_file_is_written_into_a_bundle(writer: list[str], name: str, sound: Path, editor: BundleEditor) -> None:
    link = editor.path.with_name("link")
    link.symlink_to(editor.path)
    for folder in (editor.path, link):
        command_fails(
            *arguments(writer, sound, folder / name), "--overwrite", says=r"expected a file outside of bundles, found"
        )
    comparison = filecmp.dircmp(sound, editor.path)
    assert not comparison.diff_files + comparison.left_only + comparison.right_only


@pytest.mark.parametrize("writer", WRITERS, ids=" ".join)
def test_a_hyphen_is_standard_output(
    writer: list[str], sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments(writer, sound, Path("-")))
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "out"
    run(*arguments(writer, sound, file))
    begin = file.read_bytes()[:4]
    assert result.stdout_bytes.startswith(begin)
    assert len(result.stdout_bytes) == pytest.approx(file.stat().st_size, rel=0.05)  # times differ


@pytest.mark.parametrize("writer", [["pull", "https://example.com/x", "-o"], ["recut", "BUNDLE", "-o"]], ids=" ".join)
def test_a_folder_is_not_written_to_standard_output(writer: list[str], sound: Path) -> None:
    result = run(*arguments(writer, sound, Path("-")))
    assert (result.exit_code, "cannot be written to standard output" in result.stderr) == (2, True)


@pytest.mark.process
@pytest.mark.parametrize("writer", [["report", "BUNDLE", "-o"]], ids=" ".join)
def test_a_full_disk_leaves_the_file_that_was_there(writer: list[str], sound: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    command = [str(STAGEPACK), *arguments(writer, sound, out), "--overwrite"]
    finished = subprocess.run(
        ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh", *command], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert finished.stderr == f"stagepack: {out}: cannot be written: File too large\n"
    assert out.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.process
def test_a_pipe_is_written_as_it_is(sound: Path) -> None:
    for _ in range(2):
        finished = subprocess.run(
            [STAGEPACK, "plan", sound, "-o", "/dev/stdout", "--json"], capture_output=True, text=True, check=True
        )
        assert finished.stdout.startswith('{\n "stages": [')


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with output_file(link) as path:
        path.write_text("new")
        assert target.read_text() == "old"
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_an_error_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")

    def write_half() -> None:
        with output_file(out) as path:
            path.write_text("half")
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        write_half()
    with pytest.raises(WriteError, match="out: cannot be written: No such file or directory"), output_file(out):
        pass
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("out")
        for overwrite in (False, True):
            with pytest.raises(WriteError, match="out: expected a file, found another kind: choose another name"):
                check_output_file("out", overwrite=overwrite)
    assert stat.S_ISSOCK(os.stat("out").st_mode)


def test_a_disk_is_no_file(tmp_path: Path) -> None:
    """A disk has content, unlike a pipe or a terminal."""
    disk = tmp_path / "disk"
    try:
        os.mknod(disk, stat.S_IFBLK | 0o600, os.makedev(7, 255))
    except PermissionError:
        pytest.skip("this user makes no devices")
    with pytest.raises(WriteError, match="disk: expected a file, found another kind: choose another name"):
        check_output_file(disk, overwrite=False)


def test_a_manifest_beside_the_file_that_cannot_be_read_is_none_of_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("/proc/self/mem")  # it opens, and fails to read its first bytes
    check_output_file(tmp_path / "out", overwrite=False)
