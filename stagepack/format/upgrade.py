"""Old manifests and graphs to the latest version. Nothing else in stagepack knows an old version.

Format 1.0 is the first version: there is nothing to upgrade from yet, so what is read is what is returned.
"""

import re
from typing import Any, Final

from stagepack.errors import FormatError, Problem, VersionError
from stagepack.format.version import FEATURES, MAJOR, MINOR, VERSION

_VERSION: Final = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


def is_newer_minor(version: str) -> bool:
    """Whether a bundle of this version may hold fields that this code does not know, and ignores (SPEC E2)."""
    match = _VERSION.fullmatch(version)
    return match is not None and (int(match[1]), int(match[2])) > (MAJOR, MINOR)


def check_version(fields: Any, where: str) -> None:
    """Refuse a bundle that this code cannot read, before anything else of it is interpreted.

    Raises:
        FormatError: no ``major.minor`` version (M2), or features that are not names (M3).
        VersionError: a newer major version (M2), or a feature that is not known (M3).
    """
    version = fields.get("version") if isinstance(fields, dict) else None
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or int(match[1]) == 0:
        found = repr(version[:80]) if isinstance(version, str) else type(version).__name__
        message = f"expected a version such as {VERSION}, found {found}"
        raise FormatError([Problem(rule="M2", where=where, message=message)])
    if int(match[1]) > MAJOR:
        raise VersionError(
            f"{where}: this bundle has format {version}, this stagepack reads {MAJOR}.x: upgrade stagepack [M2]"
        )
    features = fields.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise FormatError([Problem(rule="M3", where=where, message="expected the features as a list of names")])
    unknown = [name[:80] for name in features if name not in FEATURES]
    if unknown:
        raise VersionError(
            f"{where}: this bundle needs the features {unknown[:9]}, which this stagepack lacks: upgrade stagepack [M3]"
        )
