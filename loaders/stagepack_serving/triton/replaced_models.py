"""Which models of a repository a new ensemble replaces: the old ensemble of its name, and the parts of that ensemble."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from stagepack.errors import OutputExistsError, StagepackError, first_line
from stagepack.format.manifest_reader import read_manifest
from stagepack.format.validate import MANIFEST_NAME
from stagepack_serving.triton.written_models import is_written_by_stagepack

_CONFIG_NAME: Final = "config.pbtxt"
_OWN_FILES: Final = frozenset({_CONFIG_NAME, "1/model.py", "1/.keep"})

# The Python of the server writes it when it imports model.py.
_COMPILED_CODE: Final = re.compile(r"1/__pycache__/model\.[\w.-]+\.pyc", re.ASCII)


def find_replaced_models(root: Path, new_names: Sequence[str], *, overwrite: bool) -> list[Path]:
    """Find the models that an ensemble and its parts replace.

    The parts of the old ensemble are the steps of its configuration. A part that no ensemble names is replaced, too, if a new part has its
    name: a writer that was killed may leave one.
    """
    ensemble_name = new_names[-1]
    old_folders = [root / model_name for model_name in reversed(new_names) if os.path.lexists(root / model_name)]
    if not old_folders:
        return []
    if not overwrite:
        raise OutputExistsError(
            f"{old_folders[0]}: exists already: choose another name (--name), or replace the ensemble of this name and its parts "
            "(--overwrite)"
        )
    configs = dict(_read_configs(root))
    old_parts = _part_names(configs.get(ensemble_name, ModelConfig()), ensemble_name)
    part_folders = [root / part_name for part_name in old_parts if part_name not in new_names]
    old_folders += [folder for folder in part_folders if os.path.lexists(folder)]
    for folder in old_folders:
        _check_origin(folder, ensemble_name, configs)
        _check_files(folder)
    return old_folders


def _read_configs(root: Path) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the name and the configuration of each model that has one."""
    for path in sorted(root.glob(f"*/{_CONFIG_NAME}")):
        if not path.is_file():
            continue
        try:
            config = text_format.Parse(path.read_bytes(), ModelConfig(), allow_unknown_field=True)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            reason = first_line(error)
            raise OutputExistsError(
                f"{path}: expected a configuration of Triton, which says whether the model uses one that is replaced: {reason}: repair or "
                "remove it"
            ) from None
        yield path.parent.name, config


def _part_names(ensemble: ModelConfig, ensemble_name: str) -> list[str]:
    """The steps of an ensemble that have the names of its own parts."""
    part_pattern = re.compile(rf"{re.escape(ensemble_name)}_(stage_\d+|results)", re.ASCII)
    step_names = dict.fromkeys(step.model_name for step in ensemble.ensemble_scheduling.step)
    return [step_name for step_name in step_names if part_pattern.fullmatch(step_name)]


def _check_origin(folder: Path, ensemble_name: str, configs: Mapping[str, ModelConfig]) -> None:
    """Refuse a model that stagepack did not write as the ensemble of this name, or as a part of it alone."""
    if not is_written_by_stagepack(folder):
        raise OutputExistsError(
            f"{folder}: was not written by stagepack, and is not overwritten: choose another name (--name)"
        )
    is_ensemble = configs[folder.name].HasField("ensemble_scheduling")
    if is_ensemble != (folder.name == ensemble_name):
        kind = "an ensemble of its own" if is_ensemble else "a part of an ensemble"
        raise OutputExistsError(
            f"{folder}: expected the ensemble {ensemble_name} or a part of it, found {kind}, which is not overwritten: choose another name "
            "(--name)"
        )
    for model_name, config in configs.items():
        step_names = {step.model_name for step in config.ensemble_scheduling.step}
        if model_name != ensemble_name and folder.name in step_names:
            raise OutputExistsError(
                f"{folder}: expected a model that only the ensemble {ensemble_name} uses, found that {model_name} uses it too: choose "
                f"another name (--name), or remove {model_name} first"
            )


def _check_files(folder: Path) -> None:
    """Refuse a model with files that stagepack does not write, which would be deleted."""
    own_files = _OWN_FILES | _bundle_files(folder / "1")
    for path in _files_below(folder):
        relative_path = path.relative_to(folder).as_posix()
        if relative_path not in own_files and not _COMPILED_CODE.fullmatch(relative_path):
            raise OutputExistsError(
                f"{folder}: expected only files that stagepack writes, found {relative_path}, which would be deleted: move it out of the "
                "repository, or choose another name (--name)"
            )


def _bundle_files(version_folder: Path) -> frozenset[str]:
    """The files of the bundle that a model may have, by the manifest in its folder; none if there is no manifest that can be read."""
    try:
        manifest = read_manifest(version_folder)
    except StagepackError:
        return frozenset()
    return frozenset(f"1/{file_name}" for file_name in (MANIFEST_NAME, *(file.name for file in manifest.files)))


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all that is not a folder, at any depth; a link to a folder is a file, too."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        else:
            yield path
