"""Convert manifests and graphs of old versions to the latest version. No other module of stagepack knows an old version.

Format 1.0 is the first version, so there is no conversion yet; this module refuses the versions that this code cannot read.
"""

import re
from typing import Any, Final

from stagepack.errors import VersionError
from stagepack.format.manifest import FEATURES, MAJOR, MINOR, VERSION
from stagepack.format.rules import rule_error

_VERSION_PATTERN: Final = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


def is_newer_minor(version: str) -> bool:
    """Whether a version is newer than the one that this code writes, so that unknown fields are ignored (SPEC E2)."""
    match = _VERSION_PATTERN.fullmatch(version)
    return match is not None and (int(match[1]), int(match[2])) > (MAJOR, MINOR)


def check_version(fields: Any, location: str) -> None:
    """Refuse a manifest that this code cannot read, before anything else in it is interpreted."""
    version = fields.get("version") if isinstance(fields, dict) else None
    match = _VERSION_PATTERN.fullmatch(version) if isinstance(version, str) else None
    if match is None or int(match[1]) == 0:
        shown = repr(version[:80]) if isinstance(version, str) else type(version).__name__
        message = f"expected a version such as {VERSION}, found {shown}"
        raise rule_error("M2", location, message)
    if int(match[1]) > MAJOR:
        raise VersionError(
            f"{location}: the bundle has format {version}, this stagepack reads {MAJOR}.x: upgrade stagepack [M2]"
        )
    features = fields.get("features", [])
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise rule_error("M3", location, "expected the features as a list of names")
    unknown = [feature[:80] for feature in features if feature not in FEATURES]
    if unknown:
        raise VersionError(
            f"{location}: the bundle needs the features {unknown[:9]}, which this stagepack lacks: upgrade stagepack [M3]"
        )
