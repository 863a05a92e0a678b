"""TLS for REST and gRPC: the certificate of the server, its key, and who signs the certificates of clients."""

import os
import ssl
from typing import Any

import grpc

from stagepack_serving.server.credential_files import read_credential_file
from stagepack_serving.server.errors import CredentialError


class ServerTls:
    """TLS 1.2 and 1.3 of a server. The certificate and its key can be replaced while it runs; new connections have the new ones.

    Attributes:
        context: what Python's ssl needs.
    """

    def __init__(
        self,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        client_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        """Read and check the files.

        Args:
            certificate: a PEM file with the certificate of the server, and those between it and its authority.
            key: a PEM file with its private key, without a password.
            client_ca: a PEM file with the authorities whose certificates clients must have; None if clients need none.

        Raises:
            CredentialError: a file cannot be read or does not hold what it should, the key is not that of the certificate, or other users
                can read it.
        """
        self._certificate_path = certificate
        self._key_path = key
        self._client_ca: bytes | None = None
        self.context = _new_context()
        self._pair = _read_pair(certificate, key, self.context)
        if client_ca is not None:
            self._client_ca = read_credential_file(client_ca, "client CA", is_secret=False)
            _check_certificates(client_ca, self._client_ca, "client CA")
            self.context.load_verify_locations(cadata=self._client_ca.decode())
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read the certificate and its key again.

        Raises:
            CredentialError: as when they were read first; the old ones are used on.
        """
        _read_pair(self._certificate_path, self._key_path, _new_context())
        self._pair = _read_pair(self._certificate_path, self._key_path, self.context)

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC server.

        Returns:
            The credentials, which follow `reload`.
        """
        sent_pair = self._pair

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration([sent_pair], root_certificates=self._client_ca)

        def changed_configuration() -> Any:
            """Called for each handshake; None if nothing has changed."""
            nonlocal sent_pair
            if sent_pair is self._pair:
                return None
            sent_pair = self._pair
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), changed_configuration, require_client_authentication=self._client_ca is not None
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
    """Read a key and its certificate, which the context then uses; return them in PEM, the key first.

    Raises:
        CredentialError: they cannot be used.
    """
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


def _check_certificates(path: str | os.PathLike[str], content: bytes, description: str) -> None:
    """Check that a file holds certificates.

    Raises:
        CredentialError: it does not.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        reason = _reason(error) if isinstance(error, ssl.SSLError) else "it is not ASCII"
        raise CredentialError(f"{path}: expected a {description} in PEM: {reason}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
