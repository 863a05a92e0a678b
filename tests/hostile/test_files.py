"""Files that are missing, cut short, changed, added or not files: nothing of a bundle is trusted before it is checked."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, FormatError, NotABundleError, OptionError, StagepackError
from stagepack.format import limits
from stagepack_loaders.options import Verify
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import answer, command_fails, run

KINDS = [
    "manifest.json", "stage-1.msgpack", "stage-1.safetensors", "shared-0.safetensors", "example.safetensors",
    "model.safetensors.index.json",
]  # fmt: skip
WEIGHTS = ["stage-1.safetensors", "stage-2.safetensors", "shared-0.safetensors"]


def folder_with(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Make a folder with something as its manifest."""

    def make_folder(path: Path) -> None:
        path.mkdir()
        make(path / "manifest.json")

    return make_folder


NO_BUNDLES: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "file": lambda path: path.write_text("not a folder"),
    "empty": Path.mkdir,
    "other": folder_with(lambda path: path.write_text('{"name": "web app", "format": "pwa", "icons": []}')),
    "list": folder_with(lambda path: path.write_text("[1, 2, 3]")),
    "folder": folder_with(Path.mkdir),
    "pipe": folder_with(os.mkfifo),
    "dangling": folder_with(lambda path: path.symlink_to("nowhere")),
    "link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_what_is_not_a_bundle_is_said_to_be_none(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "it"
    make(path)
    for road in (stagepack.open, stagepack.load, lambda path: stagepack.load_stage(path, 0)):
        with pytest.raises(NotABundleError, match=r"it(/manifest\.json)?: not a stagepack .*expected"):
            road(path)
    for command in ("inspect", "verify", "load"):
        command_fails(command, str(path), says="not a stagepack .*expected")


def test_a_bundle_may_lie_behind_a_link(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sound)
    stagepack.open(tmp_path / "link").verify()
    stagepack.load(str(tmp_path / "link"))


@pytest.mark.parametrize("name", KINDS)
def test_a_file_cut_short_is_refused(name: str, editor: BundleEditor) -> None:
    whole = (editor / name).read_bytes()
    for size in sorted({0, 1, 7, 8, 9, 64, len(whole) // 2, len(whole) - 1}):
        (editor / name).write_bytes(whole[:size])
        with pytest.raises(StagepackError, match=name):
            stagepack.open(editor.path).verify()
        command_fails("verify", str(editor.path), says=name)
        if name == "manifest.json" or name.startswith(("stage", "shared")):
            for verify in get_args(Verify):
                with pytest.raises(StagepackError, match=name):
                    stagepack.load(editor.path, verify=verify)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "manifest.json"])
def test_a_file_that_is_cut_short_or_longer_names_both_sizes(name: str, editor: BundleEditor) -> None:
    size = (editor / name).stat().st_size
    for found in (size - 1, size + 1):
        editor.truncate(name, found)
        with pytest.raises(DigestError, match=f"{name}: expected {size} bytes, found {found}"):
            stagepack.open(editor.path).verify()


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_anywhere_is_refused(name: str, editor: BundleEditor) -> None:
    whole = (editor / name).read_bytes()
    for position in {*range(0, len(whole), 13), *range(64), *range(len(whole) - 80, len(whole))}:
        editor.flip_bit(name, position, bit=position % 8)
        with pytest.raises(StagepackError):
            stagepack.open(editor.path).verify()
        (editor / name).write_bytes(whole)
    stagepack.open(editor.path).verify()
    editor.flip_bit(name, len(whole) // 2)
    command_fails("verify", str(editor.path))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_plain_load_sees_a_flipped_bit_of_any_weight(name: str, editor: BundleEditor) -> None:
    whole = (editor / name).read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for position in {*range(0, len(whole), 29), *range(data, data + 8), *range(len(whole) - 8, len(whole))}:
        editor.flip_bit(name, position, bit=position % 8)
        with pytest.raises(StagepackError, match=name):
            stagepack.load(editor.path)
        (editor / name).write_bytes(whole)
    editor.flip_bit(name, len(whole) - 1, bit=7)
    with pytest.raises(DigestError, match=rf"{name}: the content was changed: expected blake3 \w+, found \w+"):
        stagepack.load(editor.path)
    command_fails("load", str(editor.path), says=name)


def test_only_the_stages_that_use_a_damaged_file_refuse_it(editor: BundleEditor) -> None:
    editor.flip_bit("stage-1.safetensors", (editor / "stage-1.safetensors").stat().st_size - 1)
    for stage in (0, 2):
        stagepack.load_stage(editor.path, stage)
    with pytest.raises(DigestError, match=r"stage-1\.safetensors"):
        stagepack.load_stage(editor.path, 1)
    command_fails("load", str(editor.path), "--stage", "1", says=r"stage-1\.safetensors")


def test_a_caller_who_asks_for_it_gets_weights_unchecked(editor: BundleEditor) -> None:
    editor.flip_bit("stage-1.safetensors", (editor / "stage-1.safetensors").stat().st_size - 1)
    stagepack.load(editor.path, verify="manifest")
    for copy in (False, True):
        with pytest.raises(DigestError, match=r"stage-1\.safetensors"):
            stagepack.load(editor.path, copy=copy)
    editor.flip_bit("stage-1.msgpack", (editor / "stage-1.msgpack").stat().st_size - 1)
    with pytest.raises(DigestError, match=r"stage-1\.msgpack"):
        stagepack.load(editor.path, verify="manifest")
    stagepack.load(editor.path, verify="off")
    # Without digests the rules still hold.
    (editor / "stage-1.msgpack").write_bytes(b"\xc1" * (editor / "stage-1.msgpack").stat().st_size)
    with pytest.raises(FormatError, match=r"stage-1\.msgpack: not msgpack"):
        stagepack.load(editor.path, verify="off")


@pytest.mark.parametrize("verify", [True, False, "all", None])
def test_an_unknown_way_to_verify_is_refused(verify: Any, editor: BundleEditor) -> None:
    with pytest.raises(OptionError, match="verify: expected one of 'full', 'manifest', 'off'"):
        stagepack.load(editor.path, verify=verify)


def test_a_changed_example_is_refused_before_it_is_compared(editor: BundleEditor) -> None:
    editor.flip_bit("example.safetensors", (editor / "example.safetensors").stat().st_size - 1)
    stagepack.load(editor.path)
    command_fails("load", str(editor.path), says=r"example\.safetensors: the content was changed")


def test_all_damaged_files_are_named_at_once(editor: BundleEditor) -> None:
    (editor / "stage-0.msgpack").unlink()
    editor.truncate("stage-1.safetensors", 9)
    editor.flip_bit("example.safetensors", 100)
    (editor / "extra").touch()
    with pytest.raises(DigestError) as caught:
        stagepack.open(editor.path).verify(strict=True)
    assert {problem.where for problem in caught.value.problems} == {
        "stage-0.msgpack",
        "stage-1.safetensors",
        "example.safetensors",
        "extra",
    }


def test_more_unlisted_files_than_a_graph_may_report_problems_are_all_named(editor: BundleEditor) -> None:
    names = {f"extra{number}" for number in range(limits.REPORTED_PROBLEMS + 1)}
    for name in names:
        (editor / name).touch()
    with pytest.raises(DigestError) as caught:
        stagepack.open(editor.path).verify(strict=True)
    assert {problem.where for problem in caught.value.problems} == names


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda _: None, "the file is missing"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a plain file"),
    "folder": (Path.mkdir, "not a plain file"),
    "pipe": (os.mkfifo, "not a plain file"),
}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "manifest.json"])
@pytest.mark.parametrize(("make", "says"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_missing_or_no_plain_file_is_refused_unread(
    make: Callable[[Path], object], says: str, name: str, editor: BundleEditor
) -> None:
    (editor / name).unlink()
    make(editor / name)
    with pytest.raises(DigestError, match=f"{name}: {says}"):
        stagepack.open(editor.path).verify()
    if name.startswith(("stage", "shared")):
        for verify in get_args(Verify):
            with pytest.raises(DigestError, match=f"{name}: {says}"):
                stagepack.load(editor.path, verify=verify)
    command_fails("verify", str(editor.path), says=f"{name}: {says}")


@pytest.mark.parametrize("name", ["extra.py", ".hidden", "stage-9.safetensors", "a b", "new\nline", "\x1b[31mred"])
def test_an_extra_file_is_named(name: str, editor: BundleEditor) -> None:
    (editor / name).write_text("import os")
    stagepack.open(editor.path).verify()
    verified = run("verify", str(editor.path))
    assert verified.exit_code == 0
    assert "not of the bundle, and read by nothing: " in verified.stdout
    assert all(line.isprintable() for line in verified.stdout.splitlines())
    with pytest.raises(DigestError, match="the file is not listed in the manifest"):
        stagepack.open(editor.path).verify(strict=True)
    command_fails("verify", str(editor.path), "--strict", says="the file is not listed in the manifest")


def test_an_extra_file_of_any_bytes_is_named(editor: BundleEditor) -> None:
    (Path(os.fsdecode(os.fsencode(editor.path) + b"/\xff\xfe"))).touch()
    command_fails("verify", str(editor.path), "--strict", says="the file is not listed in the manifest")
    command_fails("verify", str(editor.path), "--strict", "--json", says="the file is not listed in the manifest")
    assert json.loads(run("verify", str(editor.path), "--json").stdout)["unlisted"] == ["\udcff\udcfe"]


def test_an_extra_folder_is_named_and_a_signature_is_none(editor: BundleEditor) -> None:
    (editor / "model.sig").write_text("signature")
    stagepack.open(editor.path).verify(strict=True)
    (editor / "sub").mkdir()
    with pytest.raises(DigestError, match="sub: the file is not listed"):
        stagepack.open(editor.path).verify(strict=True)


def test_one_stage_needs_its_own_files_alone(editor: BundleEditor) -> None:
    expected = answer(editor.path)["logits"]
    own = {"manifest.json", "stage-1.msgpack", "stage-1.safetensors"}
    hidden = [stagepack.load_stage(editor.path, 0)(torch.arange(6).reshape(2, 3))[0]]
    last = stagepack.load_stage(editor.path, 2)
    for path in editor.path.iterdir():
        if path.name not in own:
            path.unlink()
    hidden = list(stagepack.load_stage(editor.path, 1)(*hidden))
    assert torch.equal(last(*hidden)[0], expected)


def test_running_writes_no_state_into_the_files(editor: BundleEditor) -> None:
    pipe = stagepack.load(editor.path)
    ids = torch.arange(6).reshape(2, 3)
    assert [pipe(ids)["calls"].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    with torch.no_grad():
        for tensor in pipe.state_dict().values():
            tensor.add_(1)
    stagepack.open(editor.path).verify()
    assert answer(editor.path)["calls"].item() == 1.0


def test_what_is_loaded_does_not_notice_that_the_files_go(editor: BundleEditor) -> None:
    expected = answer(editor.path)["logits"]
    pipe = stagepack.load(editor.path)
    shutil.rmtree(editor.path)
    assert torch.equal(pipe(torch.arange(6).reshape(2, 3))["logits"], expected)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Root, who may read every file, becomes the user nobody."""
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", [*KINDS, "."])
def test_what_this_user_must_not_read_is_named(name: str, editor: BundleEditor) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # those of pytest are for one user
        path = Path(folder) / "m.stagepack"
        shutil.copytree(editor.path, path)
        Path(folder).chmod(0o755)
        (path / name).chmod(0)
        roads: list[Callable[[Path], Any]] = [stagepack.verify]
        if not name.startswith(("example", "model")):
            roads.append(stagepack.load)
        for road in roads:
            with another_user(), pytest.raises(StagepackError, match=f"{name.strip('.')}.*Permission denied"):
                road(path)
        (path / name).chmod(0o700)
