"""Extensions: packages that add to stagepack what it does not import, found by entry points."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from stagepack.errors import MissingPackageError

_GROUP: Final = "stagepack.extensions"


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a package adds to stagepack; its distribution has an object of this class as entry point of ``stagepack.extensions``.

    Attributes:
        public_names: the names of `stagepack.__all__` that the package defines, each with its module, which is imported when the name is
            first used, and its name there.
        pipeline_methods: the methods of `CallablePipeline`, such as `generate`, that the package defines as functions, each with its module
            and its name there.
        export_options: the options of `stagepack.export`, such as `generate`, whose work functions of the package do, each with its
            module and its name there.
        source: the module of a `stagepack.capture.extensions.SourceExtension`, which the export imports, and its name there.
        server: the module of a `stagepack_serving.server.extensions.ServerExtension`, which a server imports, and its name there.
    """

    public_names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pipeline_methods: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    export_options: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    source: tuple[str, str] | None = None
    server: tuple[str, str] | None = None


@functools.cache
def installed_extensions() -> Mapping[str, Extension]:
    """The extensions of all installed distributions, by the values of their entry points."""
    extensions: dict[str, Extension] = {}
    for entry_point in entry_points(group=_GROUP):
        distribution = "its distribution" if entry_point.dist is None else entry_point.dist.name
        problem = (
            f"the extension {entry_point.name!r} of stagepack: expected an object of Extension at {entry_point.value}"
        )
        remedy = f"install {distribution} again, or remove it"
        try:
            extension = entry_point.load()
        except Exception as error:  # whatever a module raises when it is imported
            raise MissingPackageError(f"{problem}, found: {error}: {remedy}", name=entry_point.module) from error
        if not isinstance(extension, Extension):
            raise MissingPackageError(f"{problem}, found {type(extension).__name__}: {remedy}", name=entry_point.module)
        extensions[entry_point.value] = extension
    return extensions


def home_of(public_name: str) -> tuple[str, str]:
    """Return the module that defines a public name in an extension, and its name there."""
    return _only_home(
        f"stagepack.{public_name}",
        {value: extension.public_names.get(public_name) for value, extension in installed_extensions().items()},
    )


@functools.cache
def pipeline_method(name: str) -> Callable[..., Any]:
    """Return the function of an extension that is a method of pipelines."""
    return _function(
        f"the method {name} of a pipeline",
        {value: extension.pipeline_methods.get(name) for value, extension in installed_extensions().items()},
    )


def export_option(name: str) -> Callable[..., Any]:
    """Return the function of an extension that does the work of an option of `stagepack.export`."""
    return _function(
        f"the option {name} of an export",
        {value: extension.export_options.get(name) for value, extension in installed_extensions().items()},
    )


def _function(title: str, homes: Mapping[str, tuple[str, str] | None]) -> Callable[..., Any]:
    module_name, function_name = _only_home(title, homes)
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function


def stated_objects(field_name: Literal["source", "server"]) -> Sequence[Any]:
    """Return the objects that extensions state in a field; none is refused, since the distribution of stagepack has one."""
    homes = [getattr(extension, field_name) for extension in installed_extensions().values()]
    found = [getattr(importlib.import_module(home[0]), home[1]) for home in homes if home is not None]
    if not found:
        raise MissingPackageError(
            "expected the extensions of stagepack among the installed distributions, found none: install stagepack again (in a "
            "checkout: pip install --editable .)",
            name="stagepack",
        )
    return found


def _only_home(title: str, homes: Mapping[str, tuple[str, str] | None]) -> tuple[str, str]:
    """The home that the one extension states which has one."""
    found = {value: home for value, home in homes.items() if home is not None}
    if len(found) == 1:
        return found.popitem()[1]
    remedy = "remove one" if found else "install stagepack again (in a checkout: pip install --editable .)"
    raise MissingPackageError(
        f"{title}: expected one installed extension that defines it, as an entry point of {_GROUP}, found "
        f"{' and '.join(found) or 'none'}: {remedy}",
        name=title,
    )
