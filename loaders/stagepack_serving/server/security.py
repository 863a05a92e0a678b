"""Who may use a server."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from stagepack.errors import OptionError
from stagepack_serving.server.credential_reloading import WatchedFiles
from stagepack_serving.server.tls import ServerTls
from stagepack_serving.server.tokens import StoredTokens, TokenCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """Who may use a server: by default, who can connect to it.

    Attributes:
        tls: encrypts both protocols; None for none.
        check_token: says whether a token is accepted; None if requests need none.
        watched_files: the files that are read again when they change.
    """

    tls: ServerTls | None = None
    check_token: TokenCheck | None = None
    watched_files: Sequence[WatchedFiles] = ()


def read_security(
    *,
    tls_certificate: str | os.PathLike[str] | None,
    tls_key: str | os.PathLike[str] | None,
    tls_client_ca: str | os.PathLike[str] | None,
    token_file: str | os.PathLike[str] | None,
    check_token: TokenCheck | None = None,
) -> ServerSecurity:
    """Read and check the files that say who may use a server.

    tls_certificate: as for `ServerTls`; None for no encryption.
    token_file: as for `StoredTokens`; None if requests need no token.
    """
    if (tls_certificate is None) != (tls_key is None):
        raise OptionError("tls_certificate and tls_key: expected both or none, found one")
    if tls_client_ca is not None and tls_certificate is None:
        raise OptionError("tls_client_ca: expected tls_certificate and tls_key beside it, found neither")
    if token_file is not None and check_token is not None:
        raise OptionError("token_file and check_token: expected one of them, found both")
    tls, watched_files = None, []
    if tls_certificate is not None and tls_key is not None:
        tls = ServerTls(tls_certificate, tls_key, tls_client_ca)
        tls_paths = [path for path in (tls_certificate, tls_key, tls_client_ca) if path is not None]
        watched_files.append(WatchedFiles(tls_paths, tls.reload))
    if token_file is not None:
        check_token = tokens = StoredTokens(token_file)
        watched_files.append(WatchedFiles([token_file], tokens.reload))
    return ServerSecurity(tls=tls, check_token=check_token, watched_files=watched_files)
