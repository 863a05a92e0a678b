"""`stagepack triton --overwrite` deletes the old ensemble of the same name and its parts, and nothing else of a repository."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import stagepack
from stagepack.errors import OutputExistsError, WriteError
from stagepack_serving.triton.options import RepositoryOptions
from stagepack_serving.triton.repository import write_repository

pytestmark = pytest.mark.xdist_group("serve")

USER_ENSEMBLE = """
name: "mine"
platform: "ensemble"
field_of_a_newer_triton: 1
ensemble_scheduling { step { model_name: "net_stage_0" model_version: -1 } }
"""


def write(bundle: Path, repository: Path, model_name: str = "net", *, overwrite: bool = True) -> list[str]:
    options = RepositoryOptions(model_name=model_name)
    return write_repository(stagepack.open(bundle), repository, options, overwrite=overwrite)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses_to_replace(bundle: Path, repository: Path, says: str, model_name: str = "net") -> None:
    """A refused call changes nothing."""
    before = contents(repository)
    with pytest.raises(OutputExistsError, match=says):
        write(bundle, repository, model_name)
    assert contents(repository) == before


def write_config(folder: Path, config_text: str) -> None:
    folder.mkdir()
    (folder / "config.pbtxt").write_text(config_text)


def test_ensembles_with_names_like_parts_stay(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    for model_name in ("net", "net_stage_7", "net_results"):
        write(bundles["half"], tmp_path, model_name, overwrite=False)
    before = {path: content for path, content in contents(tmp_path).items() if path.startswith("net_stage_7")}
    folders = set(os.listdir(tmp_path))
    write(bundles["half"], tmp_path)
    assert set(os.listdir(tmp_path)) == folders
    assert {path: content for path, content in contents(tmp_path).items() if path.startswith("net_stage_7")} == before


def test_an_ensemble_with_the_name_of_a_new_part_is_refused(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path)
    write(bundles["half"], tmp_path, "net_results")
    refuses_to_replace(
        bundles["skips"], tmp_path, "net_results: expected the ensemble net or a part of it, found an ens"
    )
    shutil.rmtree(tmp_path / "net_results")
    write(bundles["skips"], tmp_path)
    refuses_to_replace(
        bundles["half"], tmp_path, "net_stage_1: expected .*found a part of an", model_name="net_stage_1"
    )


def test_a_model_that_another_ensemble_uses_is_refused(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path)
    write_config(tmp_path / "mine", USER_ENSEMBLE)
    refuses_to_replace(bundles["half"], tmp_path, "net_stage_0: .* found that mine uses it too: .*or remove mine first")


def test_steps_of_other_names_stay(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    """A configuration that its user has changed names models that are no parts of it, and a folder above the repository."""
    for model_name in ("net", "two"):
        write(bundles["half"], tmp_path / "repository", model_name)
    config_path = tmp_path / "repository" / "net" / "config.pbtxt"
    config_path.write_text(config_path.read_text().replace("net_stage_1", "two_stage_1"))
    write_config(tmp_path / "net_stage_1", "")
    config_path.write_text(config_path.read_text().replace("net_stage_0", "../net_stage_1"))
    before = contents(tmp_path)
    write(bundles["half"], tmp_path / "repository")
    assert contents(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("added_file", ["net/labels.txt", "net_stage_0/2/mine.bin", "net_stage_1/1/labels.json"])
def test_files_of_the_user_are_not_deleted(bundles: Mapping[str, Path], tmp_path: Path, added_file: str) -> None:
    write(bundles["half"], tmp_path)
    folder_name, _, path_in_folder = added_file.partition("/")
    (tmp_path / added_file).parent.mkdir(exist_ok=True)
    (tmp_path / added_file).write_text("precious")
    says = f"{folder_name}: expected only files that stagepack writes, found {path_in_folder}, .*: move it out"
    refuses_to_replace(bundles["half"], tmp_path, says)


def test_links_of_the_user_are_not_deleted(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path)
    (tmp_path / "net" / "2").symlink_to(tmp_path / "net" / "1")
    refuses_to_replace(bundles["half"], tmp_path, "net: expected only files that stagepack writes, found 2,")


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_all_that_is_written_is_replaced(bundles: Mapping[str, Path], tmp_path: Path, backend: str) -> None:
    """Also parts that the new ensemble lacks, and what the Python of a server writes into a model."""
    options = RepositoryOptions(model_name="net", runtime="onnxruntime", backend=backend)
    write_repository(stagepack.open(bundles["skips"]), tmp_path, options)
    for model_code in list(tmp_path.glob("*/1/model.py")):
        (model_code.parent / "__pycache__").mkdir()
        (model_code.parent / "__pycache__" / "model.cpython-312.pyc").touch()
    assert (tmp_path / "net_results").is_dir()
    assert write(bundles["half"], tmp_path) == ["net_stage_0", "net_stage_1", "net"]
    assert sorted(os.listdir(tmp_path)) == ["net", "net_stage_0", "net_stage_1"]


def test_parts_that_a_killed_writer_left_are_replaced(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path)
    shutil.rmtree(tmp_path / "net")
    with pytest.raises(OutputExistsError, match="net_stage_1: exists already"):
        write(bundles["half"], tmp_path, overwrite=False)
    assert write(bundles["half"], tmp_path) == ["net_stage_0", "net_stage_1", "net"]


@pytest.mark.parametrize("config_text", ["name: {", "name: '\udcff'"])
def test_a_configuration_that_cannot_be_read_is_refused(
    bundles: Mapping[str, Path], tmp_path: Path, config_text: str
) -> None:
    write(bundles["half"], tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.pbtxt").write_bytes(config_text.encode(errors="surrogateescape"))
    refuses_to_replace(bundles["half"], tmp_path, "mine/config.pbtxt: expected a configuration of Triton")


def test_a_repository_that_cannot_be_read_is_refused(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    write(bundles["half"], tmp_path)
    config_path = tmp_path / "net" / "config.pbtxt"
    config_path.unlink()
    config_path.symlink_to("/proc/self/mem")
    with pytest.raises(WriteError, match="Input/output error"):
        write(bundles["half"], tmp_path)
