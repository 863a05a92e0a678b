"""The functions that a caller names on the command line -> a captured model and its inputs."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stagepack.capture.programs import Capture, Inputs
from stagepack.capture.source import capture_source
from stagepack.errors import CaptureError


def capture_source_argument(source: str, inputs: str | None) -> Capture:
    """Capture what SOURCE names: ``file.py:factory``, ``package.module:factory``, a ``.pt2`` file, or a Hugging Face folder or hub name.

    A factory takes nothing and returns a module, or a module and its `Inputs`. `inputs` is ``file.py:function``; the function
    returns `Inputs`, a tuple (by position) or a dict (by name).

    Raises:
        CaptureError: there is no such file or function, it returns something else, or the model cannot be captured.
    """
    given = Inputs() if inputs is None else to_inputs(call_user_function(inputs), inputs)
    if ":" not in source or os.path.exists(source):
        return capture_source(source, given)
    made = call_user_function(source)
    if isinstance(made, tuple) and len(made) == 2:
        made, own = made
        given = given if inputs is not None else to_inputs(own, source)
    if not isinstance(made, torch.nn.Module | torch.export.ExportedProgram):
        raise CaptureError(f"{source}: expected a torch.nn.Module, or one and its inputs, found {type(made).__name__}")
    return capture_source(made, given)


def to_inputs(made: object, where: str) -> Inputs:
    """What a user's function returned, as inputs.

    Raises:
        CaptureError: it is something else.
    """
    if isinstance(made, Inputs):
        return made
    if isinstance(made, dict):
        return Inputs(kwargs=made)
    if isinstance(made, tuple):
        return Inputs(args=made)
    raise CaptureError(
        f"{where}: expected stagepack.Inputs, a tuple or a dict of example inputs, found {type(made).__name__}"
    )


def call_user_function(name: str) -> Any:
    """Call the function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        CaptureError: it is not there, or it raised.
    """
    place, _, function = name.rpartition(":")
    if not place:
        raise CaptureError(f"{name}: expected FILE.py:FUNCTION or package.module:FUNCTION")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{place}: cannot be imported: {type(error).__name__}: {error}") from error
    target = getattr(module, function, None)
    if not callable(target):
        raise CaptureError(f"{place}: has no function {function!r}")
    try:
        return target()
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{name}: raised {type(error).__name__}: {error}") from error


def _import_module(name: str) -> ModuleType:
    """Import a module by its name, with the current folder on the path, as ``python -m`` does."""
    _find_in(Path.cwd())
    return importlib.import_module(name)


def _find_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module, with its folder on the path, so that its neighbours can be imported."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    _find_in(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
