"""Certificates of signers: followed to the one that is trusted, and refused at the wrong time."""

import json
from pathlib import Path

import pytest

import stagepack
from stagepack.errors import SignatureError

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import Authority, Signer, make_authority, model_signing, run


def test_certificates_are_followed_to_the_trusted_one(
    bundle_path: Path, signer: Signer, authority: Authority, other_authority: Authority
) -> None:
    key, certificate, chain = ("--key", authority.key), ("--certificate", authority.certificate), authority.chain
    result = run("sign", bundle_path, *key, *certificate, "--certificate-chain", chain)
    assert result.exit_code == 0, result.output
    result = run("verify", bundle_path, "--certificate", authority.root)
    assert f"signature of CN=known signer: verified with {authority.root}" in result.stdout
    signature = ("--signature", bundle_path / "model.sig")
    trusted = ("--certificate_chain", authority.root)
    assert model_signing("verify", "certificate", bundle_path, *signature, *trusted).exit_code == 0
    for trusted_file in (other_authority.root, signer.public_key, authority.certificate):
        with pytest.raises(SignatureError) as caught:
            stagepack.load(bundle_path, require_signature=trusted_file)
        assert caught.value.reason == "untrusted"


def test_the_certificates_between_may_be_those_of_the_verifier(
    bundle_path: Path, authority: Authority, tmp_path: Path
) -> None:
    stagepack.sign(bundle_path, key=authority.key, certificate=authority.certificate)
    with pytest.raises(SignatureError):
        stagepack.open(bundle_path, require_signature=authority.root)
    trusted_file = tmp_path / "authorities.crt"
    trusted_file.write_bytes(authority.root.read_bytes() + authority.chain.read_bytes())
    stagepack.open(bundle_path, require_signature=trusted_file)
    signature = ("--signature", bundle_path / "model.sig")
    trusted = ("--certificate_chain", trusted_file)
    assert model_signing("verify", "certificate", bundle_path, *signature, *trusted).exit_code == 0


@pytest.mark.parametrize("days", [(-30, -1), (1, 30)], ids=["expired", "not valid yet"])
def test_certificates_that_are_not_valid_now_are_refused(
    days: tuple[int, int], bundle_path: Path, tmp_path: Path
) -> None:
    authority = make_authority(tmp_path, "late", signer_days=days)
    stagepack.sign(
        bundle_path, key=authority.key, certificate=authority.certificate, certificate_chain=[authority.chain]
    )
    with pytest.raises(SignatureError, match="'CN=late signer' is valid from") as caught:
        stagepack.open(bundle_path, require_signature=authority.root)
    assert caught.value.reason == "expired"
    result = run("verify", bundle_path, "--certificate", authority.root)
    assert result.exit_code == 1
    assert "is valid from" in result.stderr


def test_certificates_under_another_spelling_are_not_seen(
    bundle_path: Path, tmp_path: Path, authority: Authority
) -> None:
    """A second chain in the file cannot be the one that is verified, or the one whose time is compared."""
    late = make_authority(tmp_path, "late", signer_days=(-30, -1))
    stagepack.sign(bundle_path, key=late.key, certificate=late.certificate, certificate_chain=[late.chain])
    fields = json.loads((bundle_path / "model.sig").read_text())
    material = fields["verificationMaterial"]
    material["x509_certificate_chain"] = material.pop("x509CertificateChain")
    (bundle_path / "model.sig").write_text(json.dumps(fields))
    with pytest.raises(SignatureError):
        stagepack.open(bundle_path, require_signature=late.root)
