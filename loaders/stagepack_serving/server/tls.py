"""TLS for REST and gRPC: the certificate of the server, its key, and who signs the certificates of clients."""

import os
import ssl
from dataclasses import dataclass
from typing import Any

import grpc

from stagepack_serving.server.credential_files import read_credential_file
from stagepack_serving.server.errors import CredentialError


@dataclass(frozen=True, slots=True, kw_only=True)
class _TlsFiles:
    """What was read from the files at one time, for gRPC.

    Attributes:
        key_pair: the key and the certificate in PEM.
        client_ca: the authorities of clients in PEM; None if clients need no certificate.
    """

    key_pair: tuple[bytes, bytes]
    client_ca: bytes | None


class NewestContext(ssl.SSLContext):
    """The context of a server of asyncio: each new connection gets the newest context.

    A context that is in use cannot be changed instead: it keeps a certificate for each kind of key, its authorities, and the sessions that
    clients resume.

    Attributes:
        newest: the newest context.
    """

    newest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection, as asyncio does; see `ssl.SSLContext.wrap_bio`."""
        return self.newest.wrap_bio(*args, **kwargs)


class ServerTls:
    """TLS 1.2 and 1.3 of a server. Its files can be replaced while it runs; new connections have the new ones.

    Attributes:
        context: what asyncio needs.
    """

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
        context = _new_context()
        key_pair = _read_pair(self._certificate_path, self._key_path, context)
        client_ca = None
        if self._client_ca_path is not None:
            client_ca = _read_client_ca(self._client_ca_path, context)
        self._files = _TlsFiles(key_pair=key_pair, client_ca=client_ca)
        self.context.newest = context

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC server."""
        sent_files = self._files

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration(
                [sent_files.key_pair], root_certificates=sent_files.client_ca
            )

        def changed_configuration() -> Any:
            """Called for each handshake; None if nothing has changed."""
            nonlocal sent_files
            if sent_files is self._files:
                return None
            sent_files = self._files
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), changed_configuration, require_client_authentication=self._client_ca_path is not None
        )


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


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
        context.load_cert_chain(
            certificate, key, password=lambda: ""
        )  # without a function, OpenSSL asks on the terminal
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
