"""Importing this module registers the runtime: ``stagepack load --import tests.runtimes.numpy_runtime.plugin --runtime numpy``."""

from stagepack_loaders.registry import register_runtime
from tests.runtimes.numpy_runtime.runtime import NumpyRuntime

register_runtime(NumpyRuntime())
