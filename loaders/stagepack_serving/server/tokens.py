"""Bearer tokens: RFC 6750."""

import hashlib
import hmac
import os
import re
from collections.abc import Callable, Sequence
from typing import Final

from stagepack_serving.server.credential_files import read_credential_file
from stagepack_serving.server.errors import CredentialError, RequestError, RequestStatus

# Says whether a token is accepted.
TokenCheck = Callable[[str], bool]

# The syntax of RFC 6750, section 2.1.
_TOKEN_PATTERN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# With 16 random characters of base64, guesses do not succeed although nothing limits their rate.
_MIN_CHARACTERS: Final = 16

# Values of the header WWW-Authenticate: RFC 6750, section 3.
_FIRST_CHALLENGE: Final = 'Bearer realm="stagepack"'
_REPEATED_CHALLENGE: Final = 'Bearer realm="stagepack", error="invalid_token"'


class AuthenticationError(RequestError):
    """A request has no token, or one that is not accepted.

    Attributes:
        challenge: the value of the header WWW-Authenticate of the answer.
    """

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(RequestStatus.UNAUTHENTICATED, message)
        self.challenge = challenge


class StoredTokens:
    """The tokens in a file with one on each line, of which only digests are kept. Empty lines and lines with ``#`` in front are skipped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._digests = _read_digests(path)

    def __call__(self, token: str) -> bool:
        """Return whether a token is in the file, in a time that does not tell how much of it is right."""
        token_digest = _digest(token)
        # All are compared, also after a match.
        return sum(hmac.compare_digest(token_digest, digest) for digest in self._digests) > 0

    def reload(self) -> None:
        """Read the file again."""
        self._digests = _read_digests(self._path)


def check_authorization(check_token: TokenCheck, authorization_values: Sequence[str]) -> None:
    """Check the authorization of a request."""
    if not authorization_values:
        message = "this server requires a token: send it as 'Authorization: Bearer TOKEN'"
        raise AuthenticationError(message, _FIRST_CHALLENGE)
    scheme, _, token = authorization_values[0].partition(" ")
    if len(authorization_values) > 1 or scheme.lower() != "bearer" or not check_token(token.strip()):
        message = "the token is not accepted: expected one 'Authorization: Bearer TOKEN' with a token of this server"
        raise AuthenticationError(message, _REPEATED_CHALLENGE)


def _read_digests(path: str | os.PathLike[str]) -> list[bytes]:
    """The digests of the tokens in a file."""
    digests = []
    for line_number, line in enumerate(read_credential_file(path, "token file", is_secret=True).splitlines(), start=1):
        token = line.strip().decode("latin-1")
        if not token or token.startswith("#"):
            continue
        if not _TOKEN_PATTERN.fullmatch(token) or len(token) < _MIN_CHARACTERS:
            raise CredentialError(
                f"{path}: line {line_number}: expected a token of at least {_MIN_CHARACTERS} letters, digits and -._~+/, as 'openssl rand "
                "-hex 32' prints it"
            )
        digests.append(_digest(token))
    if not digests:
        raise CredentialError(f"{path}: expected a token on each line, found none")
    return digests


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
