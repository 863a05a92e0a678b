"""Folders that stagepack has not made stay as they are, byte for byte, with their modes and times; or the command refuses them by name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import Result

import stagepack
from stagepack.errors import StagepackError
from stagepack.roads.replace import replace_weights
from tests.door.test_folders import content_store, hub_cache
from tests.hostile.attack import run

NOTES = "years of work"
Tree = dict[str, tuple[int, int, bytes | str | None]]


def tree(folder: Path) -> Tree:
    """The mode, the time of the last change and the content of all in a folder, by path."""
    found: Tree = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def plain_folder(_: Path, root: Path) -> Path:
    (root / "m").mkdir()
    (root / "m" / "notes.txt").write_text(NOTES)
    return root / "m"


def link(source: Path, root: Path) -> Path:
    shutil.copytree(source, root / "real")
    (root / "m").symlink_to("real")
    return root / "m"


def snapshot(source: Path, root: Path) -> Path:
    """A snapshot without files beside those of the bundle."""
    path = hub_cache(source, root)
    for name in ("README.md", ".gitattributes"):
        (path / name).unlink()
    (path.parents[1] / "refs").mkdir()
    (path.parents[1] / "refs" / "main").write_text(path.name)
    return path


def snapshot_of_files(source: Path, root: Path) -> Path:
    """As the Hub's cache is where there are no links."""
    path = snapshot(source, root)
    for file in path.iterdir():
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
    return path


def with_notes(source: Path, root: Path) -> Path:
    path = Path(shutil.copytree(source, root / "m"))
    (path / "notes.txt").write_text(NOTES)
    (path / "drafts").mkdir()
    return path


def damaged_with_notes(source: Path, root: Path) -> Path:
    path = with_notes(source, root)
    os.truncate(path / "manifest.json", 60)
    return path


def own_cache(source: Path, root: Path) -> Path:
    (root / "files").mkdir()
    return Path(shutil.copytree(source, root / "bundles" / stagepack.open(source).digest))


LAYOUTS = [
    plain_folder, link, snapshot, snapshot_of_files, content_store, with_notes, damaged_with_notes, own_cache
]  # fmt: skip

# FOLDER is of the layout, BUNDLE a sound one at a path, KEY a private key.
WRITERS = {
    "export into": "export nowhere.py:model -o FOLDER/inner",
    "recut into": "recut BUNDLE --stages 2 -o FOLDER/inner",
    "pull into": "pull file://BUNDLE -o FOLDER/inner",
    "compile into": "compile BUNDLE -o FOLDER/inner",
    "pull": "pull file://BUNDLE -o FOLDER --overwrite",
    "pull --digest": "pull file://BUNDLE -o FOLDER --overwrite --digest DIGEST",
    "recut": "recut BUNDLE --stages 2 -o FOLDER --overwrite",
    "recut in place": "recut FOLDER --stages 2 -o FOLDER --overwrite",
    "export": "export nowhere.py:model -o FOLDER --overwrite",
    "asset add": "asset add FOLDER ASSET",
    "asset remove": "asset remove FOLDER config.json",
    "onnx": "onnx FOLDER",
    "compile": "compile BUNDLE -o FOLDER",
    "report": "report BUNDLE -o FOLDER/page.html --overwrite",
    "triton": "triton BUNDLE -o FOLDER",
    "sign": "sign FOLDER --key KEY --overwrite",
}
# The user names the folder, and the command adds to it and changes nothing else: these names.
ADDED = {
    ("recut into", "plain_folder"): "inner",
    ("pull into", "plain_folder"): "inner",
    ("compile into", "plain_folder"): "inner",
    ("triton", "plain_folder"): "other",
    ("report", "plain_folder"): "page.html",
    ("sign", "link"): "model.sig",
    ("sign", "content_store"): "model.sig",
    ("sign", "with_notes"): "model.sig",
}
# A link leads to a bundle that stagepack has made, which these commands are there to change.
CHANGES_OWN = {("asset add", "link"), ("onnx", "link")}
CASES = [(writer, layout) for writer in WRITERS for layout in LAYOUTS]
# Each writer and each layout with some of the others, and all that change something; `make test-zoo` runs all.
DRAWN_CASES = [
    case
    if number % 3 == 0 or {(case[0], case[1].__name__)} & {*ADDED, *CHANGES_OWN}
    else pytest.param(*case, marks=pytest.mark.slow)
    for number, case in enumerate(CASES)
]


def command(text: str, folder: Path, source: Path, tmp_path: Path, **more: str) -> Result:
    (tmp_path / "asset.txt").write_text("an asset")
    words = {"FOLDER": str(folder), "BUNDLE": str(source), "ASSET": str(tmp_path / "asset.txt"), **more}
    arguments = []
    for argument in text.split():
        for word, value in words.items():
            argument = argument.replace(word, value)
        arguments.append(argument)
    return run(*arguments)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "root"))


@pytest.fixture(scope="module")
def other(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one stage."""
    return stagepack.recut(sound, out=tmp_path_factory.mktemp("other") / "other.stagepack", stages=1).path


def made(layout: Callable[[Path, Path], Path], source: Path, tmp_path: Path) -> tuple[Path, Path, Tree]:
    """A root, the folder in it, and what was there."""
    (root := tmp_path / "root").mkdir()
    folder = layout(source, root)
    return root, folder, tree(root)


def test_the_sweep_has_all_its_cases() -> None:
    assert (len(WRITERS), len(LAYOUTS), len(CASES), len(READ_CASES)) == (16, 8, 128, 24)


@pytest.mark.parametrize(("writer", "layout"), DRAWN_CASES)
def test_a_folder_that_is_written_to(
    writer: str, layout: Callable[[Path, Path], Path], sound: Path, other: Path, tmp_path: Path
) -> None:
    root, folder, before = made(layout, sound, tmp_path)
    words = {"DIGEST": stagepack.open(other).digest, "KEY": str(tmp_path / "signer.pem")}
    if writer == "sign":
        signers = pytest.importorskip("tests.signing.signers", reason="signatures need the extra sign")
        signers.make_signer(tmp_path, "signer")
    result = command(WRITERS[writer], folder, other, tmp_path, **words)
    after = tree(root)
    case = (writer, layout.__name__)
    if case in CHANGES_OWN:
        assert result.exit_code == 0, result.output
        assert after["m"] == before["m"]
        return
    if case in ADDED:
        assert result.exit_code == 0, result.output
        known = {path for path in after if path in before}
        assert all(ADDED[case] in path for path in after.keys() - known)
        assert {path for path in known if before[path][2] is not None and before[path] != after[path]} == set()
        assert known == before.keys()
        return
    assert result.exit_code == 1, result.output
    assert folder.name in result.stderr or case == ("export into", "plain_folder")
    assert result.stderr.startswith("stagepack: ")
    assert result.stderr.count("\n") == 1
    assert after == before


READERS = [
    "recut FOLDER --stages 2 -o OUT",
    "triton FOLDER -o OUT --name m",
    "report FOLDER -o OUT",
    "pull file://FOLDER -o OUT",
    "pull hf://me/m -o OUT",
    "pull hf://me/m -o OUT --digest DIGEST",
]
BUNDLES = [snapshot, snapshot_of_files, content_store, with_notes, own_cache]
READ_CASES = [(reader, layout) for reader in READERS for layout in (BUNDLES[:2] if "hf:" in reader else BUNDLES)]


@pytest.mark.parametrize(("reader", "layout"), READ_CASES)
def test_a_folder_that_is_read(reader: str, layout: Callable[[Path, Path], Path], sound: Path, tmp_path: Path) -> None:
    root, folder, before = made(layout, sound, tmp_path)
    digest = stagepack.open(sound).digest
    result = command(reader, folder, sound, tmp_path, OUT=str(tmp_path / "out"), DIGEST=digest)
    assert result.exit_code == 0, result.output
    assert tree(root) == before
    if reader.startswith("pull"):
        assert stagepack.open(tmp_path / "out").digest == digest
        assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in (tmp_path / "out").iterdir())
        stagepack.verify(tmp_path / "out")


@pytest.mark.parametrize("layout", [plain_folder, snapshot, content_store, with_notes, damaged_with_notes, own_cache])
def test_weights_are_not_replaced_there(layout: Callable[[Path, Path], Path], sound: Path, tmp_path: Path) -> None:
    root, folder, before = made(layout, sound, tmp_path)
    with pytest.raises(StagepackError, match=folder.name):
        replace_weights(sound, sound / "stage-0.safetensors", out=folder, overwrite=True)
    assert tree(root) == before


@pytest.mark.parametrize("options", ["--older-than 0", "--trim-to 0"])
def test_a_folder_that_is_named_as_the_cache(
    options: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the names of a cache have is removed, and no bundle with other files in it."""
    cache = tmp_path / "cache"
    digest = stagepack.open(sound).digest
    for name in ("llama.stagepack", digest):
        shutil.copytree(sound, cache / "bundles" / name)
    (cache / "bundles" / digest / "notes.txt").write_text(NOTES)
    shutil.copytree(sound, cache / "bundles" / ("0" * 64))
    (cache / "files").mkdir()
    for name in ("thesis.tex", "thesis.tex.part"):
        (cache / "files" / name).write_text(NOTES)
    (cache / "files" / f"{'0' * 64}.part").write_text(NOTES)
    before = tree(cache)
    result = command(f"cache {options}", cache, sound, tmp_path)
    assert result.exit_code == 0, result.output
    after = tree(cache)
    removed = {path for path in before.keys() - after.keys() if before[path][2] is not None}
    assert removed == {f"bundles/{'0' * 64}/{path.name}" for path in sound.iterdir()} | {f"files/{'0' * 64}.part"}
    assert {path for path in after if after[path][2] is not None and after[path] != before.get(path)} == set()


@pytest.mark.parametrize(
    "writer", ["recut BUNDLE --stages 2 -o OUT", "pull file://BUNDLE -o OUT", "report BUNDLE -o OUT"]
)
def test_folders_of_the_user_that_look_like_left_overs(writer: str, sound: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    beside = tmp_path / "beside"
    for name in (".out.0123abcd.part", ".out.0123abcd.old", ".out.download"):
        (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / name / "files" / "notes.txt").write_text(NOTES)
    before = {name: tree(tmp_path / name) for name in os.listdir(tmp_path)}
    result = command(writer, beside, sound, tmp_path, OUT=str(out))
    if writer.startswith("pull"):
        assert result.exit_code == 1
        assert (
            f"{tmp_path}/.out.download: expected the folder of a download, found other files in it: files/notes.txt"
            in result.stderr
        )
    else:
        assert result.exit_code == 0, result.output
        assert out.exists()
    assert {name: tree(tmp_path / name) for name in before} == before


def test_a_link_in_the_folder_of_a_download_is_not_followed(sound: Path, tmp_path: Path) -> None:
    root, folder, before = made(with_notes, sound, tmp_path)
    download = tmp_path / ".out.download"
    (download / "bundles").mkdir(parents=True)
    (download / "bundles" / ("0" * 64)).symlink_to(folder)
    result = command("pull file://BUNDLE -o OUT", folder, sound, tmp_path, OUT=str(tmp_path / "out"))
    assert result.exit_code == 1
    assert f"found other files in it: bundles/{'0' * 64}" in result.stderr
    assert tree(root) == before
