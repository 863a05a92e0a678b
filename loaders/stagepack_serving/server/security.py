"""Who may use a server: certificates for TLS, and bearer tokens (RFC 6750). Their files may be replaced while the server runs."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stagepack.errors import OptionError
from stagepack_serving.server.access_log import current_record
from stagepack_serving.server.errors import CredentialError, RequestError, RequestStatus, is_openai_path, refusal_fields
from stagepack_serving.server.metrics import Metrics

# More than any chain of certificates, or a thousand tokens.
_MAX_BYTES: Final = 1_000_000
_UNSAFE_PERMISSIONS: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
# Says whether a token is accepted.
TokenCheck = Callable[[str], bool]
# The syntax of RFC 6750, section 2.1.
_TOKEN_PATTERN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# With 16 random characters of base64, guesses do not succeed although nothing limits their rate.
_MIN_CHARACTERS: Final = 16
# Values of the header WWW-Authenticate: RFC 6750, section 3.
_FIRST_CHALLENGE: Final = 'Bearer realm="stagepack"'
_REPEATED_CHALLENGE: Final = 'Bearer realm="stagepack", error="invalid_token"'
_LOG: Final = logging.getLogger("stagepack.serve")
# How often the files are looked at.
_WATCH_SECONDS: Final = 2
# Kubernetes and load balancers ask them, and send no token.
PATHS_WITHOUT_TOKEN: Final = frozenset({"/v2/health/live", "/v2/health/ready"})


def read_credential_file(path: str | os.PathLike[str], description: str, *, is_secret: bool) -> bytes:
    """Read a file. A secret one is refused if users beside the owner and the group may read it, or any beside the owner may write it."""
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


class NewestContext(ssl.SSLContext):
    """The context of a server of asyncio: each new connection gets the newest context.

    A context that is in use cannot be changed instead: it keeps a certificate for each kind of key, its authorities, and the sessions that
    clients resume.
    """

    newest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection, as asyncio does; see `ssl.SSLContext.wrap_bio`."""
        return self.newest.wrap_bio(*args, **kwargs)


class ServerTls:
    """TLS 1.2 and 1.3 of a server. Its files can be replaced while it runs; new connections have the new ones."""

    def __init__(
        self,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        client_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self._certificate_path = certificate
        self._key_path = key
        self._client_ca_path = client_ca
        self.context = NewestContext(ssl.PROTOCOL_TLS_SERVER)
        self.reload()

    def reload(self) -> None:
        """Read the files again. Clients do not resume sessions of connections that were made before."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        key_pair = _read_pair(self._certificate_path, self._key_path, context)
        client_ca = None if self._client_ca_path is None else _read_client_ca(self._client_ca_path, context)
        # For gRPC: the key and the certificate in PEM, and the authorities of clients; None if clients need no certificate.
        self._pem: tuple[tuple[bytes, bytes], bytes | None] = (key_pair, client_ca)
        self.context.newest = context

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC server."""
        sent_pem = self._pem

        def configuration() -> Any:
            key_pair, client_ca = sent_pem
            return grpc.ssl_server_certificate_configuration([key_pair], root_certificates=client_ca)

        def changed_configuration() -> Any:
            """Called for each handshake; None if nothing has changed."""
            nonlocal sent_pem
            if sent_pem is self._pem:
                return None
            sent_pem = self._pem
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), changed_configuration, require_client_authentication=self._client_ca_path is not None
        )


def _read_pair(
    certificate: str | os.PathLike[str], key: str | os.PathLike[str], context: ssl.SSLContext
) -> tuple[bytes, bytes]:
    """Read a key and its certificate, which the context then uses; return them in PEM, the key first."""
    certificate_pem = read_credential_file(certificate, "TLS certificate", is_secret=False)
    key_pem = read_credential_file(key, "TLS key", is_secret=True)
    _check_certificates(certificate, certificate_pem, "TLS certificate")
    if b"PRIVATE KEY-----" not in key_pem:
        raise CredentialError(f"{key}: expected a TLS key in PEM, found no 'BEGIN PRIVATE KEY'")
    if b"ENCRYPTED" in key_pem:
        raise CredentialError(f"{key}: the TLS key is encrypted: decrypt it, as by 'openssl pkey -in KEY -out FILE'")
    try:
        # Without a function for the password, OpenSSL asks on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialError(f"{key}: the TLS key is not that of the certificate {certificate}") from None
        raise CredentialError(f"{certificate}, {key}: TLS cannot use them: {_reason(error)}") from None
    except OSError as error:  # one of them was removed after it was read
        raise CredentialError(f"{certificate}, {key}: cannot be read: {error.strerror or error}") from None
    return key_pem, certificate_pem


def _read_client_ca(path: str | os.PathLike[str], context: ssl.SSLContext) -> bytes:
    """Read the authorities of clients, which the context then requires; return them in PEM."""
    client_ca = read_credential_file(path, "client CA", is_secret=False)
    _check_certificates(path, client_ca, "client CA")
    context.load_verify_locations(cadata=client_ca.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    return client_ca


def _check_certificates(path: str | os.PathLike[str], content: bytes, description: str) -> None:
    """Check that a file holds certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        reason = _reason(error) if isinstance(error, ssl.SSLError) else "it is not ASCII"
        raise CredentialError(f"{path}: expected a {description} in PEM: {reason}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


class AuthenticationError(RequestError):
    """A request has no token, or one that is not accepted. The challenge is the header WWW-Authenticate of the answer."""

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
    """Check the authorization of a request, whose sender its token is from then on."""
    if not authorization_values:
        message = "this server requires a token: send it as 'Authorization: Bearer TOKEN'"
        raise AuthenticationError(message, _FIRST_CHALLENGE)
    scheme, _, token = authorization_values[0].partition(" ")
    if len(authorization_values) > 1 or scheme.lower() != "bearer" or not check_token(token.strip()):
        message = "the token is not accepted: expected one 'Authorization: Bearer TOKEN' with a token of this server"
        raise AuthenticationError(message, _REPEATED_CHALLENGE)
    if (record := current_record.get()) is not None:
        record.sender = token.strip()


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


class WatchedFiles:
    """Files that are read again when one of them has changed. If they cannot be used then, what was read before is used on."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], reload: Callable[[], None]) -> None:
        self._paths = [Path(path) for path in paths]
        self._reload = reload
        self._state = self._current_state()

    def check(self) -> None:
        """Read the files again if one of them has changed."""
        state = self._current_state()
        if state == self._state:
            return
        self._state = state
        try:
            self._reload()
        except CredentialError as error:
            _LOG.error("%s; the server goes on with what it read before", error)
        else:
            _LOG.info("%s: read again", ", ".join(map(str, self._paths)))

    def _current_state(self) -> list[tuple[int, int, int] | None]:
        return [file_state(path) for path in self._paths]


async def watch_files(watched_files: Sequence[WatchedFiles]) -> None:
    """Read files again when they have changed, until cancelled."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        for files in watched_files:
            files.check()


def file_state(path: Path) -> tuple[int, int, int] | None:
    """What differs after a file was changed or replaced; None for a pipe, which cannot be read again, and a file that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """Who may use a server: by default, who can connect to it. Files are read again when they change."""

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
    """Read and check the files that say who may use a server. None for no encryption, and if requests need no token."""
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


class TokenGuard:
    """An ASGI application that wraps another one, and answers requests without an accepted token with 401, before their bodies are read.

    The health of the server needs no token.
    """

    def __init__(self, application: ASGIApp, check_token: TokenCheck, metrics: Metrics) -> None:
        self._application = application
        self._check_token = check_token
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        values = [value.decode("latin-1") for header_name, value in scope["headers"] if header_name == b"authorization"]
        try:
            if scope["path"] not in PATHS_WITHOUT_TOKEN:
                check_authorization(self._check_token, values)
        except AuthenticationError as error:
            protocol = "openai" if is_openai_path(scope["path"]) else "rest"
            self._metrics.count_answer("", "", protocol, error.status.name)
            fields = refusal_fields(scope["path"], str(error), error.status.http_code)
            refusal = JSONResponse(fields, error.status.http_code, {"www-authenticate": error.challenge})
            await refusal(scope, receive, send)
        else:
            await self._application(scope, receive, send)
