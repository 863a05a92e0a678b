"""The import of transformers, without what it imports beside it and without what that logs."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from stagepack.extras import explain_missing_packages

# transformers.quantizers imports this module of torchao wherever torchao is installed, for checkpoints that torchao has quantized.
_TORCHAO_MODULE = "torchao.prototype.safetensors.safetensors_support"
# When torchao is imported, it warns of its CUDA libraries, and torch of its enums.
_TORCHAO_LOGGERS = ("torchao", "torch.utils._pytree")
# It warns of each attempt to reach the hub.
_HUB_LOGGER = "huggingface_hub"


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


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop warnings that libraries of transformers log, which are for their own developers or repeat an error."""
    with _quiet(*_TORCHAO_LOGGERS, _HUB_LOGGER):
        yield


@contextlib.contextmanager
def _quiet(*logger_names: str) -> Iterator[None]:
    loggers = [logging.getLogger(logger_name) for logger_name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def torchao_on_demand() -> Iterator[None]:
    """Let transformers be imported without torchao, of which a module is imported when one of its functions is called.

    What torchao logs when code in the ``with`` block imports it all the same is dropped.
    """
    with _quiet(*_TORCHAO_LOGGERS):
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
