"""The files that say whom a user trusts: one key, or several keys and certificates one after the other."""

from pathlib import Path

import pytest

import stagepack
from stagepack.errors import OptionError, SignatureError

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import Authority, Signer


def test_each_key_and_certificate_of_a_file_is_trusted(
    bundle_path: Path,
    signer: Signer,
    stranger: Signer,
    authority: Authority,
    other_authority: Authority,
    tmp_path: Path,
) -> None:
    trusted = tmp_path / "trusted.pem"
    parts = [stranger.public_key, other_authority.root, signer.public_key, authority.root]
    content = b"# the signers of this year\n".join(part.read_bytes() for part in parts)
    stagepack.sign(bundle_path, key=signer.key)
    for rolled in (
        content,
        content.replace(b"\n", b"\r\n"),
        stranger.public_key.read_bytes() + signer.public_key.read_bytes(),
    ):
        trusted.write_bytes(rolled)
        stagepack.verify(bundle_path, require_signature=trusted)
    for certificates in (parts[1::2], parts):
        trusted.write_bytes(b"".join(part.read_bytes() for part in certificates))
        stagepack.sign(
            bundle_path,
            key=authority.key,
            certificate=authority.certificate,
            certificate_chain=[authority.chain],
            overwrite=True,
        )
        stagepack.verify(bundle_path, require_signature=trusted)
    trusted.write_bytes(stranger.public_key.read_bytes() + other_authority.root.read_bytes())
    with pytest.raises(SignatureError, match="not by a trusted signer") as caught:
        stagepack.verify(bundle_path, require_signature=trusted)
    assert caught.value.reason == "untrusted"


def test_a_key_file_that_is_damaged_after_its_first_key_is_a_bad_option(
    bundle_path: Path, signer: Signer, stranger: Signer, tmp_path: Path
) -> None:
    stagepack.sign(bundle_path, key=signer.key)
    first, second = signer.public_key.read_bytes(), stranger.public_key.read_bytes()
    lines = second.splitlines(keepends=True)
    rows = {
        first + second[:60]: "has no end",
        first + lines[0] + b"AAAA\n" + lines[-1]: "expected a PEM file with public keys",
        first + stranger.key.read_bytes(): "found a private key",
        b"": "expected a PEM file with public keys",
    }
    for content, says in rows.items():
        (tmp_path / "keys.pem").write_bytes(content)
        with pytest.raises(OptionError, match=says):
            stagepack.verify(bundle_path, require_signature=tmp_path / "keys.pem")
