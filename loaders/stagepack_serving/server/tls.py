"""TLS for REST and gRPC: the certificate of the server, its key, and who signs the certificates of clients."""

import os
import ssl
from dataclasses import dataclass, field
from typing import Any

import grpc

from stagepack_serving.server.credential_files import read_credential_file
from stagepack_serving.server.errors import CredentialError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """What a server needs for TLS 1.2 and 1.3.

    Attributes:
        certificate: the certificate of the server and those between it and its authority, in PEM.
        key: its private key, in PEM.
        client_ca: the authorities whose certificates clients must have, in PEM; None if clients need none.
        context: the same for Python's ssl.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext

    def grpc_credentials(self) -> Any:
        """Return the same for grpc.

        Returns:
            The credentials of a gRPC server.
        """
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )


def read_tls_files(
    certificate: str | os.PathLike[str],
    key: str | os.PathLike[str],
    client_ca: str | os.PathLike[str] | None = None,
) -> TlsSettings:
    """Read and check the files for TLS.

    Args:
        certificate: a PEM file with the certificate of the server, and those between it and its authority.
        key: a PEM file with its private key, without a password.
        client_ca: a PEM file with the authorities whose certificates clients must have; None if clients need none.

    Returns:
        The settings.

    Raises:
        CredentialError: a file cannot be read or does not hold what it should, the key is not that of the certificate, or other users can
            read it.
    """
    certificate_pem = read_credential_file(certificate, "TLS certificate", is_secret=False)
    key_pem = read_credential_file(key, "TLS key", is_secret=True)
    _check_certificates(certificate, certificate_pem, "TLS certificate")
    if b"PRIVATE KEY-----" not in key_pem:
        raise CredentialError(f"{key}: expected a TLS key in PEM, found no 'BEGIN PRIVATE KEY'")
    if b"ENCRYPTED" in key_pem:
        raise CredentialError(f"{key}: the TLS key is encrypted: decrypt it, as by 'openssl pkey -in KEY -out FILE'")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: ""
        )  # without a function, OpenSSL asks on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialError(f"{key}: the TLS key is not that of the certificate {certificate}") from None
        raise CredentialError(f"{certificate}, {key}: TLS cannot use them: {_reason(error)}") from None
    client_ca_pem = None
    if client_ca is not None:
        client_ca_pem = read_credential_file(client_ca, "client CA", is_secret=False)
        _check_certificates(client_ca, client_ca_pem, "client CA")
        context.load_verify_locations(cadata=client_ca_pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return TlsSettings(certificate=certificate_pem, key=key_pem, client_ca=client_ca_pem, context=context)


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
