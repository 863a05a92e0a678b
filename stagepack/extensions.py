"""Extensions: packages that add to stagepack what it does not import, found by entry points."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Final

from stagepack.errors import MissingPackageError

_GROUP: Final = "stagepack.extensions"


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a package adds to stagepack; its distribution has an object of this class as entry point of ``stagepack.extensions``.

    Attributes:
        public_names: the names of `stagepack.__all__` that the package defines, each with its module, which is imported when the name is
            first used, and its name there.
        server: the module of a `stagepack_serving.server.extensions.ServerExtension`, which a server imports, and its name there.
    """

    public_names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
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
        except (ImportError, AttributeError) as error:
            raise MissingPackageError(f"{problem}, found: {error}: {remedy}", name=entry_point.module) from error
        if not isinstance(extension, Extension):
            raise MissingPackageError(f"{problem}, found {type(extension).__name__}: {remedy}", name=entry_point.module)
        extensions[entry_point.value] = extension
    return extensions


def home_of(public_name: str) -> tuple[str, str]:
    """Return the module that defines a public name in an extension, and its name there."""
    homes = {
        value: extension.public_names[public_name]
        for value, extension in installed_extensions().items()
        if public_name in extension.public_names
    }
    if len(homes) == 1:
        return homes.popitem()[1]
    remedy = "remove one" if homes else "install stagepack again (in a checkout: pip install --editable .)"
    raise MissingPackageError(
        f"stagepack.{public_name}: expected one installed extension that defines it, as an entry point of {_GROUP}, found "
        f"{' and '.join(homes) or 'none'}: {remedy}",
        name=f"stagepack.{public_name}",
    )
