"""Small files that say who may connect to a server: certificates, keys and tokens."""

import os
import stat
from pathlib import Path
from typing import Final

from stagepack_serving.server.errors import CredentialError

# More than any chain of certificates, or a thousand tokens.
_MAX_BYTES: Final = 1_000_000
_UNSAFE_PERMISSIONS: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def read_credential_file(path: str | os.PathLike[str], description: str, *, is_secret: bool) -> bytes:
    """Read a file.

    is_secret: refuse a file that other users than the owner and the group may read, or others than the owner may write.
    """
    try:
        with Path(path).open("rb") as file:
            permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if is_secret and permissions & _UNSAFE_PERMISSIONS:
                raise CredentialError(
                    f"{path}: the {description} has the permissions {permissions:04o}, so that other users can read or change it: "
                    "remove them with 'chmod g-w,o-rw', or mount a secret of Kubernetes with 'defaultMode: 0440'"
                )
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CredentialError(f"{path}: the {description} cannot be read: {error.strerror or error}") from None
    if not content or len(content) > _MAX_BYTES:
        found = f"more than {_MAX_BYTES} bytes" if content else "an empty file"
        raise CredentialError(f"{path}: expected a {description}, found {found}")
    return content
