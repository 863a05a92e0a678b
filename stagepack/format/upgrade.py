"""Old manifests and graphs to the latest version. Nothing else in stagepack knows an old version.

Format 1.0 is the first version: there is nothing to upgrade from yet, so what is read is what is returned.
"""

import re
from typing import Any

from stagepack.errors import FormatError, Problem, VersionError
from stagepack.format.version import FEATURES, MAJOR, VERSION


def check_version(fields: Any, where: str) -> None:
    """Refuse a bundle that this code cannot read, before anything else of it is interpreted.

    Raises:
        FormatError: no ``major.minor`` version (M2).
        VersionError: a newer major version (M2), or a feature that is not known (M3).
    """
    version = fields.get("version") if isinstance(fields, dict) else None
    if not isinstance(version, str) or not re.fullmatch(r"(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})", version):
        raise FormatError(
            [Problem(rule="M2", where=where, message=f"expected a version such as {VERSION}, found {version!r}")]
        )
    if int(version.split(".")[0]) > MAJOR:
        raise VersionError(
            f"{where}: this bundle has format {version}, this stagepack reads {MAJOR}.x: upgrade stagepack [M2]"
        )
    features = fields.get("features", [])
    unknown = [name for name in features if name not in FEATURES] if isinstance(features, list) else [features]
    if unknown:
        raise VersionError(
            f"{where}: this bundle needs the features {unknown}, which this stagepack lacks: upgrade stagepack [M3]"
        )
