"""A bundle -> a Triton model repository: one model a stage, and an ensemble that wires them.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from stagepack.errors import InputError, OutputExistsError, WriteError
from stagepack.format.reader import Bundle
from stagepack_serving.triton.models import Model, Options, models_of

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)

# How a configuration that is written here begins.
_HEAD: Final = "# Written by stagepack.\n"

# The code of a model in the Python backend: what the server imports it from must be installed for its Python.
_CODE: Final = '"""Written by stagepack."""\n\nfrom stagepack_serving.triton.{module} import TritonPythonModel as TritonPythonModel\n'


def write_repository(
    bundle: Bundle, out: str | os.PathLike[str], options: Options, *, overwrite: bool = False
) -> list[str]:
    """Write the models of a bundle into a model repository, which may hold others already; return their names, the ensemble last.

    Each model is a folder of its own: it holds the files of its stage, and the manifest.

    Raises:
        InputError: the name is not one for a folder, or the repository would lie in the bundle.
        OutputExistsError: the repository holds a model of one of these names, and `overwrite` is false.
        WriteError: the folder cannot be written, or takes no links to the bundle's files.
        DeviceError: a device is none of Triton's, or there are more devices than stages.
        OperatorError: Triton's ONNX Runtime cannot run a stage.
        DigestError: a file of the bundle is damaged.
    """
    if not _NAME.fullmatch(options.name):
        raise InputError(f"expected a name of letters, digits, '_', '-' and '.', found {options.name!r}")
    root = Path(out)
    if bundle.path.resolve() in (root.resolve(), *root.resolve().parents):
        raise InputError(f"{root}: a bundle holds no models: choose another folder")
    bundle.check_digests(bundle.files)
    models = models_of(bundle, options)
    names = [model.config.name for model in models]
    old = [path for path in sorted(root.glob(f"{options.name}*")) if _is_of(path.name, options.name)]
    if old and not overwrite:
        raise OutputExistsError(
            f"{old[0]}: exists already: choose another name (--name), or overwrite all models of this one (--overwrite)"
        )
    if foreign := [path for path in old if not _is_ours(path)]:
        raise OutputExistsError(
            f"{foreign[0]}: was not written by stagepack, so it is not overwritten: choose another name"
        )
    part = root / f".{secrets.token_hex(4)}.part"
    try:
        for model in models:
            _write(bundle, part / "new" / model.config.name, model, copy=options.copy)
        (part / "old").mkdir()
        _rename(
            [(path, part / "old" / path.name) for path in old] + [(part / "new" / name, root / name) for name in names]
        )
    except OSError as error:
        raise WriteError(f"{error.filename2 or error.filename or root}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return names


def _rename(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename all of these, or none."""
    with contextlib.ExitStack() as back:
        for source, target in pairs:
            source.rename(target)
            back.callback(target.rename, source)
        back.pop_all()


def _is_of(name: str, ensemble: str) -> bool:
    """Whether a name is that of an ensemble or of a model that it wires."""
    return re.fullmatch(r"(_stage_\d+|_results)?", name[len(ensemble) :]) is not None


def _is_ours(folder: Path) -> bool:
    config = folder / "config.pbtxt"
    return config.is_file() and config.read_text(encoding="utf-8").startswith(_HEAD)


def _write(bundle: Bundle, folder: Path, model: Model, *, copy: bool) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    text = text_format.MessageToString(model.config)
    (folder / "config.pbtxt").write_text(_HEAD + text, encoding="utf-8")
    if model.module is not None:
        (version / "model.py").write_text(_CODE.format(module=model.module), encoding="utf-8")
    else:
        (version / ".keep").touch()  # stores of objects know no empty folders, and Triton wants this one
    for name in model.files:
        if copy:
            shutil.copyfile(bundle.path / name, version / name)
            continue
        try:
            os.link(bundle.path / name, version / name)
        except OSError as error:
            raise WriteError(
                f"{version / name}: no link to the bundle's file can be made there ({error.strerror}): copy the files (--copy)"
            ) from None
