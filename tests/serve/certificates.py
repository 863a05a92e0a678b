"""Certificate authorities and certificates for tests."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate, and the files that hold it and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    certificate_file: Path
    key_file: Path


def secret_file(path: Path, content: bytes | str, permissions: int = 0o600) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(permissions)
    return path


def make_certificate(
    folder: Path,
    name: str,
    authority: Certificate | None = None,
    *,
    has_expired: bool = False,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
) -> Certificate:
    """A certificate for 127.0.0.1 that an authority has signed; without one, a new authority. A new key is one of an elliptic curve."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    signing_key = key if authority is None else authority.key
    # Python 3.13 requires of an authority that it says so: its default context is strict.
    usages = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    usage = dict.fromkeys(usages.split(), False) | dict.fromkeys(("key_cert_sign", "crl_sign"), authority is None)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=-1 if has_expired else 1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .sign(signing_key, hashes.SHA256())
    )
    certificate_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret_file(key_file, key.private_bytes(*pem))
    return Certificate(certificate=certificate, key=key, certificate_file=certificate_file, key_file=key_file)
