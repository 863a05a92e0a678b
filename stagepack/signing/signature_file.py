"""The file ``model.sig``: a Sigstore bundle (JSON) with a DSSE envelope over the names and digests of all files of the bundle.

The file comes from a stranger. It is decoded here, and model_signing verifies a file that is encoded again from the decoded fields. So both
see the same certificates, whatever duplicate keys or aliases the file has.
"""

import base64
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from cryptography import x509

from stagepack.errors import SignatureError
from stagepack.format.rules import JSON_ERRORS


class _Certificate(msgspec.Struct, frozen=True, rename="camel"):
    raw_bytes: str


# More would take memory and time before the signature is verified.
_MOST_ITEMS = msgspec.Meta(max_length=16)


class _CertificateChain(msgspec.Struct, frozen=True):
    certificates: Annotated[tuple[_Certificate, ...], _MOST_ITEMS]


class _PublicKey(msgspec.Struct, frozen=True, omit_defaults=True):
    hint: str | None = None


class _VerificationMaterial(msgspec.Struct, frozen=True, omit_defaults=True):
    chain: _CertificateChain | None = msgspec.field(default=None, name="x509CertificateChain")
    public_key: _PublicKey | None = msgspec.field(default=None, name="publicKey")


class _DsseSignature(msgspec.Struct, frozen=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: Annotated[tuple[_DsseSignature, ...], _MOST_ITEMS]


class _SignedFile(msgspec.Struct, frozen=True):
    name: str
    digest: str


class _SignedFiles(msgspec.Struct, frozen=True):
    resources: tuple[_SignedFile, ...]


class _Statement(msgspec.Struct, frozen=True):
    predicate: _SignedFiles


class SignatureFile(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of the file that are used.

    Attributes:
        media_type: the type of the file.
        verification_material: the certificates of the signer, or a hash of its public key.
        dsse_envelope: what is signed, and the signature.
    """

    media_type: str
    verification_material: _VerificationMaterial
    dsse_envelope: _Envelope

    @classmethod
    def parse(cls, content: bytes, location: str) -> "SignatureFile":
        """Decode the file."""
        try:
            return msgspec.json.decode(content, type=cls)
        except JSON_ERRORS as error:
            raise SignatureError(
                f"{location}: model.sig is not a signature of model_signing: {error}", reason="malformed"
            ) from None

    def encode(self) -> bytes:
        """Return the file with the known fields only, each once."""
        return msgspec.json.encode(self)

    def signed_digests(self) -> dict[str, str]:
        """Return the digest of each file that is signed, in hexadecimal, by file name. The signature must be one of `sign_bundle`."""
        statement = msgspec.json.decode(base64.b64decode(self.dsse_envelope.payload), type=_Statement)
        return {signed_file.name: signed_file.digest for signed_file in statement.predicate.resources}

    def certificates(self) -> list[x509.Certificate]:
        """Return the certificate of the signer, and then the certificates of the authorities that issued it; empty for a key."""
        chain = self.verification_material.chain
        entries = () if chain is None else chain.certificates
        return [x509.load_der_x509_certificate(base64.b64decode(entry.raw_bytes)) for entry in entries]

    def check_validity_periods(self, location: str) -> None:
        """Refuse certificates that are not valid now.

        model_signing compares them with the time at which the certificate of the signer became valid. Since nothing proves when a
        signature was made, a key that is found years later could still sign.
        """
        now = datetime.now(UTC)
        for certificate in self.certificates():
            start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if not start <= now <= end:
                raise SignatureError(
                    f"{location}: the certificate of {certificate.subject.rfc4514_string()[:200]!r} is valid from "
                    f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC: have the bundle signed again with a valid one",
                    reason="expired",
                )
