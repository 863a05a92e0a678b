"""The errors that people meet first."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import NotABundleError, StagepackError


def test_a_command_of_a_close_name_is_named() -> None:
    result = CliRunner().invoke(main, ["verfy", "m.stagepack"])
    assert result.exit_code == 2
    assert "No such command 'verfy'. Did you mean stagepack verify?" in result.output


def test_each_thing_that_is_no_bundle_has_its_own_message(exported: tuple[Path, object], tmp_path: Path) -> None:
    shutil.copytree(exported[0], tmp_path / "model.stagepack")
    (tmp_path / "empty.stagepack").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    messages = {
        "modl.stagepack": f"no such path: did you mean {tmp_path}/model.stagepack?",
        "other": "no such path",
        "file": "a file",
        "empty.stagepack": "a folder without it",
        "link": "a link that leads nowhere",
    }
    for name, found in messages.items():
        with pytest.raises(NotABundleError) as caught:
            stagepack.open(tmp_path / name)
        expected = f"{tmp_path / name}: not a stagepack bundle: expected a folder with a file manifest.json, found {found} [M1]"
        assert str(caught.value) == expected


def test_errors_begin_with_the_name_of_the_bundle(exported: tuple[Path, object], tmp_path: Path) -> None:
    path = Path(shutil.copytree(exported[0], tmp_path / "model.stagepack"))
    (path / "stage-1.safetensors").write_bytes(b"")
    manifest = json.loads((path / "manifest.json").read_bytes())
    newer = Path(shutil.copytree(exported[0], tmp_path / "newer.stagepack"))
    (newer / "manifest.json").write_text(json.dumps(manifest | {"version": "2.0"}))
    roads: list[tuple[Path, Callable[[], object]]] = [
        (path, lambda: stagepack.load(path)),
        (path, lambda: stagepack.load(stagepack.open(path))),
        (path, lambda: stagepack.load(path, devices="nonsense")),
        (path, lambda: stagepack.load(path, ["cpu"] * 3)),
        (path, lambda: stagepack.load_stage(path, 1)),
        (path, lambda: stagepack.load_entry_points(path)),
        (path, lambda: stagepack.verify(path)),
        (path, lambda: stagepack.recut(path, out=tmp_path / "out", stages=1)),
        (path, lambda: stagepack.add_onnx(path)),
        (path, lambda: stagepack.open(f"{path}#nothing")),
        (path, lambda: stagepack.open(path, digest="short")),
        (newer, lambda: stagepack.open(newer)),
        (newer, lambda: stagepack.load(newer)),
    ]
    for named, road in roads:
        with pytest.raises(StagepackError, match=f"^{named}: (?!{named})"):
            road()
    for arguments in (
        ["inspect", path, "--stage", 7],
        ["load", path],
        ["verify", path],
        ["plan", path, "--stages", 99],
        ["recut", path, "--stages", 1, "-o", tmp_path / "out"],
        ["report", path, "-o", tmp_path / "out", "--trace", path / "manifest.json"],
        ["compile", path, "-o", tmp_path / "out"],
        ["profile", path, "-o", tmp_path / "out"],
        ["triton", path, "-o", tmp_path / "out"],
        ["serve", path],
        ["asset", "remove", path, "nothing"],
    ):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith(f"stagepack: {path}"), (arguments, result.stderr)
