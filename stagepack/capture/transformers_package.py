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
# When torchao is imported, it warns of its CUDA libraries, and torch of its enums. The hub's client warns of each attempt to reach it.
_LOGGERS = ("torchao", "torch.utils._pytree", "huggingface_hub")


def import_transformers() -> Any:
    """Import transformers; torchao is not imported with it, but when a function of it is called.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    with explain_missing_packages(), quiet_libraries(), _torchao_on_demand():
        transformers = importlib.import_module("transformers")
        # Loaded on first use, and with it the quantizers.
        importlib.import_module("transformers.modeling_utils")
    return transformers


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop warnings that libraries of transformers log, which are for their own developers or repeat an error."""
    loggers = [logging.getLogger(logger_name) for logger_name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _torchao_on_demand() -> Iterator[None]:
    """Let functions be imported from a module of torchao that is not imported before one of them is called."""
    if _TORCHAO_MODULE in sys.modules:
        yield
        return
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
