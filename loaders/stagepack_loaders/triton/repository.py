"""A bundle -> a Triton model repository: one model a stage, and an ensemble that wires them.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from stagepack.errors import InputError, OutputExistsError, WriteError
from stagepack.format.reader import Bundle
from stagepack_loaders.triton.models import Model, Options, models_of

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)

# The code of a model in the Python backend: what the server imports it from must be installed for its Python.
_CODE: Final = '"""Written by stagepack."""\n\nfrom stagepack_loaders.triton.{module} import TritonPythonModel as TritonPythonModel\n'


def write_repository(
    bundle: Bundle, out: str | os.PathLike[str], options: Options, *, overwrite: bool = False
) -> list[str]:
    """Write the models of a bundle into a model repository, which may hold others already; return their names, the ensemble last.

    Each model is a folder of its own: it holds the files of its stage, and the manifest.

    Raises:
        InputError: the name is not one for a folder.
        OutputExistsError: the repository holds a model of one of these names, and `overwrite` is false.
        WriteError: the folder cannot be written, or takes no links to the bundle's files.
        DeviceError: a device is none of Triton's, or there are more devices than stages.
        OperatorError: Triton's ONNX Runtime cannot run a stage.
        DigestError: a file of the bundle is damaged.
    """
    if not _NAME.fullmatch(options.name):
        raise InputError(f"expected a name of letters, digits, '_', '-' and '.', found {options.name!r}")
    bundle.check_digests(bundle.files)
    models = models_of(bundle, options)
    root = Path(out)
    names = [model.config.name for model in models]
    taken = [name for name in names if os.path.lexists(root / name)]
    if taken and not overwrite:
        raise OutputExistsError(
            f"{root}: holds the model {taken[0]} already: choose another name (--name), or overwrite it (--overwrite)"
        )
    part = root / f".{secrets.token_hex(4)}.part"
    try:
        for model in models:
            _write(bundle, part / model.config.name, model, copy=options.copy)
        for name in names:
            if name in taken:
                shutil.rmtree(root / name)
            (part / name).rename(root / name)
    except OSError as error:
        raise WriteError(f"{error.filename2 or error.filename or root}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return names


def _write(bundle: Bundle, folder: Path, model: Model, *, copy: bool) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    text = text_format.MessageToString(model.config)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
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
