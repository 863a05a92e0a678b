"""Modules and functions of a user, and transformers, imported without what they import beside them. Without torch."""

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from stagepack.capture.torch_messages import describe_error, only_errors_logged
from stagepack.errors import CaptureError
from stagepack.extras import explain_missing_packages

# transformers.quantizers imports this module of torchao wherever torchao is installed, for checkpoints that torchao has quantized.
_TORCHAO_MODULE = "torchao.prototype.safetensors.safetensors_support"
# When torchao is imported, it warns of its CUDA libraries, and torch of its enums.
_TORCHAO_LOGGERS = ("torchao", "torch.utils._pytree")
# diffusers warns where this torchao lacks what diffusers knows.
_DIFFUSERS_LOGGER = "diffusers.quantizers.torchao.torchao_quantizer"
# The logger that warns of each attempt to reach the hub.
_HUB_LOGGER = "huggingface_hub"


def call_user_function(reference: str) -> Any:
    """Call a function of a user without arguments: ``file.py:function`` or ``package.module:function``.

    Modules are found in the current folder too, those next to the file as well.
    """
    module_reference, _, function_name = reference.rpartition(":")
    if not module_reference:
        raise CaptureError(f"{reference}: expected FILE.py:FUNCTION or package.module:FUNCTION, found no function")
    try:
        with torchao_on_demand():
            is_file = module_reference.endswith(".py")
            module = import_user_file(Path(module_reference)) if is_file else import_user_module(module_reference)
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


def import_transformers() -> Any:
    """Import transformers; torchao is not imported with it, but when a function of it is called."""
    with explain_missing_packages(), torchao_on_demand():
        transformers = importlib.import_module("transformers")
        # Loaded on first use, and with it the quantizers.
        importlib.import_module("transformers.modeling_utils")
    return transformers


def register_model_outputs() -> None:
    """Let transformers, if it is imported, register its containers of results: it registers none that are first imported in a trace."""
    if "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.modeling_outputs")


def quiet_libraries() -> contextlib.AbstractContextManager[None]:
    """Drop warnings that libraries of transformers log, which are for their own developers or repeat an error."""
    return only_errors_logged(*_TORCHAO_LOGGERS, _DIFFUSERS_LOGGER, _HUB_LOGGER)


@contextlib.contextmanager
def torchao_on_demand() -> Iterator[None]:
    """Let transformers be imported without torchao, of which a module is imported when one of its functions is called.

    What torchao logs when code in the ``with`` block imports it all the same is dropped.
    """
    with only_errors_logged(*_TORCHAO_LOGGERS):
        if _TORCHAO_MODULE in sys.modules:
            yield
        else:
            with _stand_in():
                yield


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    stand_in = ModuleType(_TORCHAO_MODULE)
    stand_in.__dict__["__getattr__"] = _function_on_demand
    # The import system does not import the packages around a module that it has.
    sys.modules[_TORCHAO_MODULE] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_TORCHAO_MODULE) is stand_in:
            del sys.modules[_TORCHAO_MODULE]


def _function_on_demand(function_name: str) -> Callable[..., Any]:
    if function_name.startswith("__"):
        raise AttributeError(function_name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(_TORCHAO_MODULE), function_name)(*args, **kwargs)

    return call
