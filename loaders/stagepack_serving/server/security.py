"""Who may use a server."""

import os
from dataclasses import dataclass

from stagepack.errors import OptionError
from stagepack_serving.server.tls import TlsSettings, read_tls_files
from stagepack_serving.server.tokens import TokenCheck, read_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """Who may use a server: by default, who can connect to it.

    Attributes:
        tls: encrypts both protocols; None for none.
        check_token: says whether a token is accepted; None if requests need none.
    """

    tls: TlsSettings | None = None
    check_token: TokenCheck | None = None


def read_security(
    *,
    tls_certificate: str | os.PathLike[str] | None,
    tls_key: str | os.PathLike[str] | None,
    tls_client_ca: str | os.PathLike[str] | None,
    token_file: str | os.PathLike[str] | None,
    check_token: TokenCheck | None = None,
) -> ServerSecurity:
    """Read and check the files that say who may use a server.

    Args:
        tls_certificate: as for `read_tls_files`; None for no encryption.
        tls_key: the same.
        tls_client_ca: the same.
        token_file: as for `read_tokens`; None if requests need no token.
        check_token: says whether a token is accepted, in the place of a file.

    Returns:
        The settings.

    Raises:
        OptionError: the arguments do not go together.
        CredentialError: a file cannot be used.
    """
    if (tls_certificate is None) != (tls_key is None):
        raise OptionError("tls_certificate and tls_key: expected both or none, found one")
    if tls_client_ca is not None and tls_certificate is None:
        raise OptionError("tls_client_ca: expected tls_certificate and tls_key beside it, found neither")
    if token_file is not None and check_token is not None:
        raise OptionError("token_file and check_token: expected one of them, found both")
    tls = None
    if tls_certificate is not None and tls_key is not None:
        tls = read_tls_files(tls_certificate, tls_key, tls_client_ca)
    return ServerSecurity(tls=tls, check_token=check_token if token_file is None else read_tokens(token_file))
