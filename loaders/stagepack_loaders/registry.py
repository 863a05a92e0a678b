"""The registry of runtimes: the only place that lists them. Nothing else depends on the name of a runtime."""

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from stagepack.errors import MissingPackageError, OperatorError, OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Runtime
from stagepack_loaders.options import DEFAULT_RUNTIME

TORCH_RUNTIME: Final = "torch"

# Name -> the runtime, or the module and class of one that was not used yet: they are imported when they are used.
_REGISTRY: dict[str, Runtime | str] = {
    "torch": "stagepack_loaders.torch.runtime:TorchRuntime",
    "onnxruntime": "stagepack_loaders.onnxruntime.runtime:OnnxRuntime",
}


def register_runtime(runtime: Runtime) -> None:
    """Add a runtime, which ``load(..., runtime=NAME)`` and ``--runtime NAME`` then accept.

    Registering an object of the same class again replaces it.

    Args:
        runtime: an object of a subclass of `Runtime`.

    Raises:
        OptionError: it is not a `Runtime`, has no name, or another runtime has its name.

    Examples:
        >>> register_runtime(NumpyRuntime())
        >>> pipeline = stagepack.load("m.stagepack", runtime="numpy")

        On the command line, ``--import MODULE`` imports the module that registers it first.
    """
    if not isinstance(runtime, Runtime):
        raise OptionError(
            f"expected an object of a subclass of stagepack_loaders.base.Runtime, found {type(runtime).__name__}"
        )
    runtime_name = getattr(runtime, "name", None)
    if not isinstance(runtime_name, str) or not runtime_name.isidentifier():
        raise OptionError(f"{type(runtime).__name__}: expected a name that is an identifier, found {runtime_name!r}")
    registered = _REGISTRY.get(runtime_name)
    if registered is not None and type(registered) is not type(runtime):
        raise OptionError(f"there is another runtime with the name {runtime_name!r}: choose another name")
    _REGISTRY[runtime_name] = runtime


def runtime_names() -> tuple[str, ...]:
    """Return the names of all runtimes, in the order of their registration. Imports nothing."""
    return tuple(_REGISTRY)


def find_runtime(runtime_name: object) -> Runtime:
    """Return the runtime of a name. The library that it needs is not imported."""
    entry = _REGISTRY.get(runtime_name) if isinstance(runtime_name, str) else None
    if entry is None:
        raise OptionError(f"expected the runtime {' or '.join(map(repr, _REGISTRY))}, found {runtime_name!r}")
    if isinstance(entry, str):
        module_name, _, class_name = entry.partition(":")
        runtime: Runtime = getattr(importlib.import_module(module_name), class_name)()
        _REGISTRY[runtime.name] = entry = runtime
    return entry


def import_runtime(runtime_name: object) -> Runtime:
    """Return the runtime of a name, after importing the library that it needs."""
    runtime = find_runtime(runtime_name)
    for package in runtime.packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            message = f"the package {error.name!r} is not installed: {runtime.install} installs it"
            raise MissingPackageError(message, name=error.name) from None
    return runtime


def choose_runtime(runtime_name: object, bundle: Bundle, stage_numbers: Iterable[int]) -> Runtime:
    """Return the runtime of a name; of ``"auto"`` the first one that is installed and that stages have files for, and torch without one."""
    if runtime_name != DEFAULT_RUNTIME:
        return find_runtime(runtime_name)
    stage_numbers, lacking_files = list(stage_numbers), ""
    for runtime in runtimes():
        if all(importlib.util.find_spec(package) is not None for package in runtime.packages):
            try:
                for stage_number in stage_numbers:
                    runtime.stage_files(bundle, stage_number)
            except OperatorError as error:
                lacking_files = f"; {runtime.name} is installed: {error}"
                continue
            return runtime
    torch_runtime = find_runtime(TORCH_RUNTIME)
    if lacking_files and importlib.util.find_spec(TORCH_RUNTIME) is None:
        message = f"the package {TORCH_RUNTIME!r} is not installed: {torch_runtime.install} installs it{lacking_files}"
        raise MissingPackageError(message, name=TORCH_RUNTIME)
    return torch_runtime


def runtime_of_each_stage(runtime: str | Sequence[str], bundle: Bundle) -> list[Runtime]:
    """Return the runtime of each stage, without importing its library."""
    stage_count = len(bundle.stages)
    if not isinstance(runtime, list | tuple):
        return [choose_runtime(runtime, bundle, range(stage_count))] * stage_count
    if len(runtime) != stage_count:
        raise OptionError(f"expected a runtime, or one for each of {stage_count} stages, found {len(runtime)}")
    return [choose_runtime(runtime_name, bundle, [number]) for number, runtime_name in enumerate(runtime)]


def runtimes() -> Iterator[Runtime]:
    """Yield all runtimes, without importing the libraries that they need."""
    return (find_runtime(runtime_name) for runtime_name in runtime_names())
