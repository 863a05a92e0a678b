"""Writes a bundle into a model repository of Triton: one model for each stage, and an ensemble that connects them.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from stagepack.errors import InputError, WriteError
from stagepack.format.reader import Bundle
from stagepack.format.temporary_folder import TemporaryFolder, exchange_paths
from stagepack_serving.triton.ensemble import ensemble_models
from stagepack_serving.triton.options import RepositoryOptions
from stagepack_serving.triton.replaced_models import find_replaced_models
from stagepack_serving.triton.triton_model import TritonModel
from stagepack_serving.triton.written_models import CONFIG_MARKER

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)

# Triton runs a file named model.py or libtriton_python.so in the folder of a model, and a stranger chooses the names in a bundle.
_FILE_SUFFIXES: Final = (".json", ".msgpack", ".safetensors", ".onnx")

# The code of a model in the Python backend. The Python of the server must have stagepack installed.
_MODEL_CODE: Final = '"""Written by stagepack."""\n\nfrom stagepack_serving.triton.{module} import TritonPythonModel as TritonPythonModel\n'


def write_repository(
    bundle: Bundle, out: str | os.PathLike[str], options: RepositoryOptions, *, overwrite: bool = False
) -> list[str]:
    """Write the models of a bundle into a model repository.

    Each model is a folder with its configuration, the manifest, and the files of its stage. All models appear together: an error leaves
    the repository as it was. If the process is killed while it replaces models, some may be the old ones: repeat the call.

    overwrite: replace the ensemble of the same name and its parts, if stagepack wrote them and nobody else added files to them.
    """
    if not _MODEL_NAME.fullmatch(options.model_name):
        raise InputError(f"expected a name of letters, digits, '_', '-' and '.', found {options.model_name!r}")
    root = Path(out)
    if bundle.path.resolve() in (root.resolve(), *root.resolve().parents):
        raise InputError(f"{root}: a bundle cannot contain a model repository: choose another folder")
    bundle.check_digests(bundle.files)
    models = ensemble_models(bundle, options)
    _check_file_names(bundle, models)
    model_names = [model.config.name for model in models]
    try:
        old_folders = find_replaced_models(root, model_names, overwrite=overwrite)
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(root.resolve() / options.model_name) as temporary:
            for model in models:
                _write_model(bundle, temporary.path / "new" / model.config.name, model, copy=options.copy)
            _put_in_place(temporary.path, root, model_names, old_folders)
    except OSError as error:
        raise WriteError(f"{error.filename2 or error.filename or root}: {error.strerror}") from None
    return model_names


def _check_file_names(bundle: Bundle, models: Sequence[TritonModel]) -> None:
    for model in models:
        for file_name in model.file_names:
            if not file_name.endswith(_FILE_SUFFIXES):
                raise InputError(
                    f"{bundle.location}: expected files that end with {', '.join(_FILE_SUFFIXES)}, found {file_name}: Triton may run files "
                    "with other names, so that they are not put into its repository"
                )


def _put_in_place(temporary: Path, root: Path, model_names: Sequence[str], old_folders: Sequence[Path]) -> None:
    """Put the models of the folder ``new`` into the repository, and those that they replace into the folder ``old``; or change nothing.

    Where the system can exchange two folders, a process that is killed meanwhile leaves each model as it was, or the new one. The ensemble
    is the last: until then the configuration of the old one says which parts are replaced.
    """
    (temporary / "old").mkdir()
    with contextlib.ExitStack() as undo:

        def move(source: Path, target: Path) -> None:
            source.rename(target)
            undo.callback(target.rename, source)

        def replace(model_name: str) -> None:
            source, target = temporary / "new" / model_name, root / model_name
            if target in old_folders and exchange_paths(source, target):
                undo.callback(exchange_paths, source, target)
                return
            if target in old_folders:
                move(target, temporary / "old" / model_name)
            move(source, target)

        for part_name in model_names[:-1]:
            replace(part_name)
        for folder in old_folders:
            if folder.name not in model_names:
                move(folder, temporary / "old" / folder.name)
        replace(model_names[-1])
        undo.pop_all()


def _write_model(bundle: Bundle, folder: Path, model: TritonModel, *, copy: bool) -> None:
    version_folder = folder / "1"
    version_folder.mkdir(parents=True)
    config_text = text_format.MessageToString(model.config)
    (folder / "config.pbtxt").write_bytes(CONFIG_MARKER + config_text.encode())
    if model.python_module is not None:
        code = _MODEL_CODE.format(module=model.python_module)
        (version_folder / "model.py").write_text(code, encoding="utf-8")
    else:
        # Triton requires the folder, and object stores do not keep empty ones.
        (version_folder / ".keep").touch()
    for file_name in model.file_names:
        _add_file(bundle.path / file_name, version_folder / file_name, copy=copy)


def _add_file(source: Path, target: Path, *, copy: bool) -> None:
    if copy:
        shutil.copyfile(source, target)
        return
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise WriteError(
            f"{target}: cannot create a hard link to the bundle's file ({error.strerror}): copy the files instead (--copy)"
        ) from None
