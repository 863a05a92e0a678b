"""A bundle that changes while another one is made of it, or in place of it: nothing unverified is copied, and nothing of others is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import stagepack
from stagepack.errors import DigestError, OutputExistsError, WriteError
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter
from stagepack.roads.replace import replace_weights
from tests.bundle_editor import BundleEditor
from tests.hostile.tiny import tiny

WEIGHT_FILE = "stage-1.safetensors"


def change_in_place(bundle_path: Path) -> None:
    """Change the last byte of a weight file; its size and the time that programs can set stay the same."""
    path = bundle_path / WEIGHT_FILE
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last_byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last_byte ^ 0x40]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut_short(bundle_path: Path) -> None:
    os.truncate(bundle_path / WEIGHT_FILE, 200)


def replace_by_a_link(bundle_path: Path) -> None:
    path = bundle_path / WEIGHT_FILE
    shutil.copyfile(path, bundle_path.with_name("elsewhere"))
    path.unlink()
    path.symlink_to(bundle_path.with_name("elsewhere"))


def replace_by_a_pipe(bundle_path: Path) -> None:
    path = bundle_path / WEIGHT_FILE
    path.unlink()
    os.mkfifo(path)


def write_newer(bundle_path: Path) -> None:
    """Another process exports other weights of the model to the same folder."""
    model, inputs = tiny()
    model.first.weight.data += 1
    stagepack.export(
        model,
        tuple(inputs.args),
        out=bundle_path,
        split_at=["first", "second"],
        dynamic_shapes=inputs.dynamic_shapes,
        overwrite=True,
    )


CHANGES = [change_in_place, cut_short, replace_by_a_link, replace_by_a_pipe, write_newer]


def change_after_call(
    monkeypatch: pytest.MonkeyPatch, function_name: str, change: Callable[[Path], None], bundle_path: Path
) -> None:
    """Let the bundle change when a function of stagepack has returned."""
    module_name, _, attribute = function_name.rpartition(".")
    function = getattr(__import__(module_name, fromlist=[attribute]), attribute)

    def changed(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        monkeypatch.setattr(function_name, function)
        change(bundle_path)
        return result

    monkeypatch.setattr(function_name, changed)


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_after_their_digests_were_compared_are_not_recut(
    change: Callable[[Path], None], editor: BundleEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_call(monkeypatch, "stagepack.roads.recut._cut", change, editor.path)
    with pytest.raises(WriteError, match=r"nothing was changed: .*safetensors: was changed while it was read: repeat"):
        stagepack.recut(editor.path, out=tmp_path / "new.stagepack", stages=1)
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.stagepack", "elsewhere"}


@pytest.mark.parametrize("change", [change_in_place, write_newer])
def test_weights_that_change_are_not_kept_beside_new_ones(
    change: Callable[[Path], None], editor: BundleEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"embed.weight": tiny()[0].embed.weight.data + 1}, tmp_path / "new.safetensors")
    change_after_call(monkeypatch, "stagepack.roads.replace._open_source", change, editor.path)
    with pytest.raises(WriteError, match="was changed while it was read: repeat"):
        replace_weights(
            editor.path, tmp_path / "new.safetensors", out=tmp_path / "new.stagepack", needed_names=["embed.weight"]
        )
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.stagepack", "new.safetensors"}


@pytest.mark.parametrize("function_name", ["_check_converted", "write_bundle"])
def test_a_bundle_that_was_written_while_another_is_converted_is_kept(
    function_name: str, editor: BundleEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_call(monkeypatch, f"stagepack.roads.onnx.add.{function_name}", write_newer, editor.path)
    before = Bundle(editor.path).digest
    with pytest.raises(WriteError, match=r"was changed while it was read: repeat"):
        stagepack.add_onnx(editor.path)
    newer = Bundle(editor.path)
    newer.verify()
    assert newer.digest != before
    assert list(editor.path.parent.iterdir()) == [editor.path]


def test_only_the_bundle_that_was_changed_is_replaced(editor: BundleEditor) -> None:
    bundle = Bundle(editor.path)
    versions = bundle.check_digests(bundle.files)

    def write() -> None:
        with BundleWriter(editor.path, overwrite=True) as writer:
            for entry in bundle.manifest.files:
                writer.link_file(bundle.path / entry.name, entry, versions[entry.name])
            write_newer(editor.path)
            writer.finish(bundle.manifest, replaced_digest=bundle.digest)

    with pytest.raises(WriteError, match=r"written meanwhile: it is kept, nothing was changed: repeat the call"):
        write()
    newer = Bundle(editor.path)
    newer.verify()
    assert newer.digest != bundle.digest


def recut_in_place(path: Path) -> None:
    stagepack.recut(path, out=path, stages=1, overwrite=True)


def replace_weights_in_place(path: Path) -> None:
    checkpoint = path.with_name("new.safetensors")
    save_file({"embed.weight": tiny()[0].embed.weight.data + 2}, checkpoint)
    replace_weights(path, checkpoint, out=path, needed_names=["embed.weight"], overwrite=True)
    checkpoint.unlink()


@pytest.mark.parametrize("in_place", [recut_in_place, replace_weights_in_place])
def test_a_bundle_that_was_written_while_the_old_one_is_changed_in_place_is_kept(
    in_place: Callable[[Path], None], editor: BundleEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_call(monkeypatch, "stagepack.roads.bundle_builder.check_all_stages", write_newer, editor.path)
    before = Bundle(editor.path).digest
    with pytest.raises(WriteError, match=r"written meanwhile: it is kept, nothing was changed: repeat the call"):
        in_place(editor.path)
    newer = Bundle(editor.path)
    newer.verify()
    assert newer.digest != before


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("has_version", [True, False])
def test_a_file_that_changed_is_not_added(
    has_links: bool, has_version: bool, editor: BundleEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    bundle = Bundle(editor.path)
    entry = bundle.files[WEIGHT_FILE]
    version = bundle.check_digests([WEIGHT_FILE])[WEIGHT_FILE] if has_version else None
    content = bytearray((editor.path / WEIGHT_FILE).read_bytes())
    content[-1] ^= 1
    (editor.path / WEIGHT_FILE).write_bytes(content)
    if not has_links:
        monkeypatch.setattr("os.link", refuse)

    def write() -> None:
        with BundleWriter(tmp_path / "new.stagepack", overwrite=False) as writer:
            writer.link_file(editor.path / WEIGHT_FILE, entry, version)

    if has_version:
        with pytest.raises(WriteError, match="was changed while it was read"):
            write()
    elif not has_links:
        with pytest.raises(DigestError, match="was changed after it was compared"):
            write()
    else:
        write()  # the caller says that nobody else writes the file


def add_files_of_the_user(bundle_path: Path) -> None:
    (bundle_path / "README.md").write_text("notes of the user")
    (bundle_path / ".git").mkdir()
    (bundle_path / ".git" / "HEAD").write_text("ref: refs/heads/main")


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "onnx": stagepack.add_onnx,
    "recut": lambda path: stagepack.recut(path, out=path, stages=1, overwrite=True),
    "new weights": lambda path: replace_weights(
        path, path.with_name("new.safetensors"), out=path, needed_names=[], overwrite=True
    ),
}


@pytest.mark.parametrize("action", IN_PLACE.values(), ids=IN_PLACE)
def test_files_that_the_manifest_does_not_list_are_not_lost_when_a_bundle_is_changed_in_place(
    action: Callable[[Path], object], editor: BundleEditor
) -> None:
    save_file({"embed.weight": tiny()[0].embed.weight.data + 1}, editor.path.with_name("new.safetensors"))
    add_files_of_the_user(editor.path)
    link = editor.path.with_name("link.stagepack")
    link.symlink_to(editor.path)
    digest = Bundle(editor.path).digest
    expected = r"files that are not of the bundle, and would be lost: \.git, README\.md: move them out of the folder"
    with pytest.raises(OutputExistsError, match=expected):
        action(editor.path)
    assert (editor.path / "README.md").read_text() == "notes of the user"
    assert (editor.path / ".git" / "HEAD").is_file()
    assert Bundle(editor.path).digest == digest
    with pytest.raises(OutputExistsError, match=expected):
        stagepack.add_onnx(link)


def test_files_that_are_added_while_a_bundle_is_converted_are_not_lost(
    editor: BundleEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_call(monkeypatch, "stagepack.roads.onnx.add._check_converted", add_files_of_the_user, editor.path)
    digest = Bundle(editor.path).digest
    with pytest.raises(OutputExistsError, match=r"would be lost: \.git, README\.md"):
        stagepack.add_onnx(editor.path)
    assert Bundle(editor.path).digest == digest
    assert (editor.path / "README.md").read_text() == "notes of the user"
