"""Modules and functions of a user, by the names that the command line takes."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stagepack.capture.torch_messages import describe_error
from stagepack.capture.transformers_package import torchao_on_demand
from stagepack.errors import CaptureError


def call_user_function(reference: str) -> Any:
    """Call a function of a user without arguments, and return its result.

    reference: ``file.py:function`` or ``package.module:function``. Modules are found in the current folder too, those next to the file as
        well.
    """
    module_reference, _, function_name = reference.rpartition(":")
    if not module_reference:
        raise CaptureError(f"{reference}: expected FILE.py:FUNCTION or package.module:FUNCTION, found no function")
    try:
        with torchao_on_demand():
            module = _import(module_reference)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{module_reference}: cannot be imported: {describe_error(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own_functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        close_names = difflib.get_close_matches(function_name, own_functions)
        hint = f": did you mean {' or '.join(close_names)}?" if close_names else ""
        raise CaptureError(f"{module_reference}: has no function {function_name!r}{hint}")
    try:
        with torchao_on_demand():
            return function()
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{reference}: raised {describe_error(error)}") from error


def _import(reference: str) -> ModuleType:
    return import_user_file(Path(reference)) if reference.endswith(".py") else import_user_module(reference)


def import_user_module(module_name: str) -> ModuleType:
    """Import a module by its name. It is searched in the current folder first, as ``python -m`` does."""
    _search_in(Path.cwd())
    return importlib.import_module(module_name)


def import_user_file(path: Path) -> ModuleType:
    """Import a file as a module. What it imports is searched in its own folder first, then in the current one."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    _search_in(Path.cwd())
    _search_in(path.parent.resolve())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
