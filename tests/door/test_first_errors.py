"""The errors that people meet first."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import NotABundleError


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
