"""Keys and certificates for the tests, made by the package cryptography, and the commands `stagepack` and `model_signing`."""

import importlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stagepack.cli import main

PEM = serialization.Encoding.PEM


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def model_signing(*arguments: str | Path) -> Result:
    """Run the command of the package in this process."""
    command = importlib.import_module("model_signing._cli").main
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@dataclass(frozen=True, kw_only=True)
class Signer:
    """A signer with a key alone."""

    key: Path  # the file of the private key
    public_key: Path  # the file of the public key


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A root authority, an authority below it, and a signer with a certificate of the latter."""

    root: Path  # the file with the certificate that verifiers trust
    chain: Path  # the file with the certificate of the authority between the root and the signer
    certificate: Path  # the file with the certificate of the signer
    key: Path  # the file of the private key of the signer


def make_signer(folder: Path, name: str, curve: ec.EllipticCurve | None = None) -> Signer:
    """Write a key pair into a folder."""
    private_key = ec.generate_private_key(curve or ec.SECP256R1())
    public_bytes = private_key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public_bytes)
    return Signer(key=_write_key(private_key, folder / f"{name}.pem"), public_key=folder / f"{name}.pub")


def make_authority(folder: Path, name: str, *, signer_days: tuple[int, int] = (-1, 30)) -> Authority:
    """Write keys and certificates into a folder; that of the signer is valid between two days, counted from today."""
    root_key, middle_key, signer_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    root = _certificate(f"{name} root", root_key, None, (-1000, 1000), is_authority=True)
    middle = _certificate(f"{name} team", middle_key, (root, root_key), (-1000, 1000), is_authority=True)
    signer = _certificate(f"{name} signer", signer_key, (middle, middle_key), signer_days, is_authority=False)
    paths = [folder / f"{name}-{role}.crt" for role in ("root", "team", "signer")]
    for path, certificate in zip(paths, (root, middle, signer), strict=True):
        path.write_bytes(certificate.public_bytes(PEM))
    key_path = _write_key(signer_key, folder / f"{name}-signer.pem")
    return Authority(root=paths[0], chain=paths[1], certificate=paths[2], key=key_path)


def _write_key(private_key: ec.EllipticCurvePrivateKey, path: Path) -> Path:
    no_password = serialization.NoEncryption()
    path.write_bytes(private_key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, no_password))
    return path


def _certificate(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    days: tuple[int, int],
    *,
    is_authority: bool,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    issuer_name, issuer_key = (subject, key) if issuer is None else (issuer[0].subject, issuer[1])
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
