"""Each way in which a bundle is not the one that a trusted signer has signed is refused: by the API, by the commands and by the server."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.errors import DigestError, ExportWarning, OptionError, OutputExistsError, SignatureError
from stagepack.format.manifest_codec import stated_and_actual_digest
from stagepack.format.writer import BundleWriter
from tests.remote.http_server import HttpServer

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import Authority, Signer, make_signer, model_signing, run


def accepted_by_model_signing(bundle_path: Path, public_key: Path) -> bool:
    signature = ("--signature", bundle_path / "model.sig")
    completed = model_signing("verify", "key", bundle_path, *signature, "--public_key", public_key)
    return completed.exit_code == 0 and "Verification succeeded" in completed.stdout


def rewrite_manifest(bundle_path: Path) -> None:
    """Change the manifest, and make its digest right again."""
    path = bundle_path / "manifest.json"
    content = path.read_bytes().replace(b'"stagepack": "0.1.0"', b'"stagepack": "9.9.9"')
    stated, actual = stated_and_actual_digest(content)
    assert stated is not None
    path.write_bytes(content.replace(stated.encode(), actual.encode()))


def change_weights(bundle_path: Path) -> None:
    path = bundle_path / "stage-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def link_other_weights(bundle_path: Path) -> None:
    """A link to a file of the same size with other content."""
    target = bundle_path.with_name("weights")
    (bundle_path / "stage-0.safetensors").rename(target)
    (bundle_path / "stage-0.safetensors").symlink_to(target)
    target.write_bytes(target.read_bytes()[:-1] + b"\x7f")


def link_signature_to_folder(bundle_path: Path) -> None:
    (bundle_path / "model.sig").unlink()
    (bundle_path / "model.sig").symlink_to(bundle_path)


def edit_signature(bundle_path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads((bundle_path / "model.sig").read_text())
    edit(fields)
    (bundle_path / "model.sig").write_text(json.dumps(fields))


def change_signed_payload(bundle_path: Path) -> None:
    edit_signature(bundle_path, lambda fields: fields["dsseEnvelope"].update(payload="e30="))


def write_signature(content: bytes) -> Callable[[Path], object]:
    return lambda bundle_path: (bundle_path / "model.sig").write_bytes(content)


def remove(file_name: str) -> Callable[[Path], object]:
    return lambda bundle_path: (bundle_path / file_name).unlink()


def drop_signatures(bundle_path: Path) -> None:
    edit_signature(bundle_path, lambda fields: fields["dsseEnvelope"].update(signatures=[]))


def add_many_certificates(bundle_path: Path) -> None:
    material = {"x509CertificateChain": {"certificates": [{"rawBytes": ""}] * 100_000}}
    edit_signature(bundle_path, lambda fields: fields.update(verificationMaterial=material))


# Changes of a bundle that the signer has signed, with the reason of the `SignatureError`, or none for a `DigestError`, and its message.
ROWS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "unsigned": (remove("model.sig"), "unsigned", "found no model.sig"),
    "changed manifest": (rewrite_manifest, "changed", "is not the one that was signed"),
    "changed byte": (change_weights, "", r"stage-0.safetensors.*\[D2\]"),
    "missing file": (remove("stage-0.safetensors"), "", r"missing \[D1\]"),
    "link": (link_other_weights, "", r"stage-0.safetensors.*\[D2\]"),
    "signature is a link to a folder": (link_signature_to_folder, "malformed", "expected a plain file"),
    "signature is no JSON": (write_signature(b"{"), "malformed", "not a signature"),
    "signature is nested": (write_signature(b'{"mediaType": ' + b"[" * 100_000), "malformed", "not a signature"),
    "signature is too large": (write_signature(b" " * (2**24 + 1)), "malformed", "at most"),
    "signature of nothing": (drop_signatures, "untrusted", "not by a trusted signer"),
    "many certificates": (add_many_certificates, "malformed", "length <= 16"),
    "changed payload": (change_signed_payload, "untrusted", "InvalidSignature"),
}


@pytest.mark.parametrize("row_name", ROWS)
def test_a_bundle_that_is_not_as_it_was_signed_is_refused(row_name: str, bundle_path: Path, signer: Signer) -> None:
    change, reason, says = ROWS[row_name]
    stagepack.sign(bundle_path, key=signer.key)
    change(bundle_path)
    key = signer.public_key
    for refuse in (
        lambda: stagepack.verify(bundle_path, require_signature=key),
        lambda: stagepack.load(bundle_path, require_signature=key),
        lambda: stagepack.load_stage(bundle_path, 0, require_signature=[key]),
        lambda: stagepack.load_entry_points(bundle_path, require_signature=key),
    ):
        with pytest.raises(SignatureError if reason else DigestError, match=says) as caught:
            refuse()
        assert getattr(caught.value, "reason", "") == reason
    for command in (("verify", bundle_path, "--key", key), ("load", bundle_path, "--require-signature", key)):
        result = run(*command)
        assert result.exit_code == 1
        assert result.stderr.startswith("stagepack: ")
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""


@pytest.mark.parametrize(
    "row_name",
    [
        "changed byte",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("unsigned", "changed manifest", "missing file", "link")
        ),
    ],
)
def test_model_signing_refuses_the_same(row_name: str, bundle_path: Path, signer: Signer) -> None:
    stagepack.sign(bundle_path, key=signer.key)
    ROWS[row_name][0](bundle_path)
    assert not accepted_by_model_signing(bundle_path, signer.public_key)


def test_what_a_signer_has_signed_is_loaded(bundle_path: Path, signer: Signer, stranger: Signer) -> None:
    stagepack.sign(bundle_path, key=signer.key)
    assert accepted_by_model_signing(bundle_path, signer.public_key)
    verified = stagepack.verify(bundle_path, require_signature=signer.public_key)
    assert verified is not None
    assert (verified.trusted_file, verified.subject) == (str(signer.public_key), None)
    keys = [stranger.public_key, signer.public_key]
    opened = stagepack.open(bundle_path, require_signature=keys)
    assert stagepack.load(opened, require_signature=keys).bundle.digest == opened.digest
    assert len(stagepack.load_entry_points(bundle_path, require_signature=keys)) == 1
    stagepack.load_stage(bundle_path, 0, require_signature=signer.public_key)
    result = run("verify", bundle_path, "--key", signer.public_key, "--json")
    assert json.loads(result.stdout)["signature"] == {"trusted_file": str(signer.public_key), "subject": None}
    assert run("load", bundle_path, "--require-signature", signer.public_key).exit_code == 0


def test_another_signer_is_refused(bundle_path: Path, signer: Signer, stranger: Signer, authority: Authority) -> None:
    stagepack.sign(bundle_path, key=stranger.key)
    for trusted_file in (signer.public_key, authority.root):
        with pytest.raises(SignatureError, match="not by a trusted signer") as caught:
            stagepack.open(bundle_path, require_signature=trusted_file)
        assert caught.value.reason == "untrusted"
    result = run("verify", bundle_path, "--key", signer.public_key, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["signature"]["reason"] == "untrusted"
    assert not accepted_by_model_signing(bundle_path, signer.public_key)


def test_a_signature_with_changed_bytes_is_refused_or_says_the_same(bundle_path: Path, signer: Signer) -> None:
    stagepack.sign(bundle_path, key=signer.key)
    bundle = stagepack.open(bundle_path)
    signature_path = bundle_path / "model.sig"
    sound = signature_path.read_bytes()
    choose = random.Random(0)  # noqa: S311 - the same bytes each time
    refused = 0
    for _ in range(300):
        changed = bytearray(sound)
        changed[choose.randrange(len(changed))] = choose.randrange(256)
        signature_path.write_bytes(changed)
        try:
            stagepack.load(bundle, require_signature=signer.public_key)
        except SignatureError:
            refused += 1
        else:
            envelope = json.loads(changed.decode(errors="replace"))["dsseEnvelope"]
            assert envelope["payload"] == json.loads(sound)["dsseEnvelope"]["payload"]
    assert refused > 200


def test_the_signature_of_another_bundle_of_the_signer_is_refused(bundle_path: Path, signer: Signer) -> None:
    other_path = Path(shutil.copytree(bundle_path, bundle_path.with_name("other.stagepack")))
    rewrite_manifest(other_path)
    stagepack.sign(other_path, key=signer.key)
    shutil.copy(other_path / "model.sig", bundle_path)
    with pytest.raises(SignatureError) as caught:
        stagepack.load(bundle_path, require_signature=signer.public_key)
    assert caught.value.reason == "changed"


@pytest.mark.parametrize("kind", ["Ed25519", "RSA", "secp256k1"])
def test_keys_of_other_kinds_are_named(kind: str, bundle_path: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    key: Any
    if kind == "secp256k1":
        key = ec.generate_private_key(ec.SECP256K1())
    else:
        key = ed25519.Ed25519PrivateKey.generate() if kind == "Ed25519" else rsa.generate_private_key(65537, 2048)
    formats = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "k.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *formats))
    public_format = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "k.pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public_format))
    says = f"expected an elliptic curve key of P-256, P-384 or P-521, found {kind}: make one with 'openssl genpkey"
    with pytest.raises(OptionError, match=rf"k\.pem: {says}"):
        stagepack.sign(bundle_path, key=tmp_path / "k.pem")
    with pytest.raises(OptionError, match=rf"k\.pub: {says}"):
        stagepack.load(bundle_path, require_signature=tmp_path / "k.pub")


def test_what_is_wrong_with_a_key_is_said_before_the_bundle_is_blamed(bundle_path: Path) -> None:
    result = run("verify", bundle_path, "--key", "nowhere.pub")
    assert result.exit_code == 1
    assert result.stderr.endswith("nowhere.pub: cannot be read: No such file or directory\n")


@pytest.mark.parametrize("bits", [384, 521])
def test_larger_keys_sign_too(bits: int, bundle_path: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    larger = make_signer(tmp_path, "larger", {384: ec.SECP384R1(), 521: ec.SECP521R1()}[bits])
    stagepack.sign(bundle_path, key=larger.key)
    stagepack.verify(bundle_path, require_signature=larger.public_key)


def test_what_model_signing_has_signed_is_accepted(bundle_path: Path, signer: Signer, authority: Authority) -> None:
    signature = ("--signature", bundle_path / "model.sig")
    completed = model_signing("sign", "key", bundle_path, *signature, "--private_key", signer.key)
    assert completed.exit_code == 0, completed.output
    stagepack.load(bundle_path, require_signature=signer.public_key)
    assert run("verify", bundle_path, "--key", signer.public_key).exit_code == 0
    files = ("--signing_certificate", authority.certificate, "--certificate_chain", authority.chain)
    key = ("--private_key", authority.key)
    assert model_signing("sign", "certificate", bundle_path, *signature, *key, *files).exit_code == 0
    stagepack.load(bundle_path, require_signature=authority.root)
    (bundle_path / "notes").touch()
    assert model_signing("sign", "key", bundle_path, *signature, "--private_key", signer.key).exit_code == 0
    stagepack.load(bundle_path, require_signature=signer.public_key)
    (bundle_path / "README.md").touch()
    stagepack.sign(bundle_path, key=signer.key, overwrite=True)
    assert "README.md" not in json.loads((bundle_path / "model.sig").read_text())["dsseEnvelope"]["payload"]
    stagepack.load(bundle_path, require_signature=signer.public_key)


@pytest.mark.parametrize("hashing", ["shards of sha256", "shards of blake2", "files by blake3", "one file"])
def test_other_hashes_of_model_signing_are_accepted(hashing: str, bundle_path: Path, signer: Signer) -> None:
    from model_signing import hashing as hashes
    from model_signing import signing

    config = hashes.Config()
    method, _, algorithm = hashing.partition(" by " if "by" in hashing else " of ")
    if method == "shards":
        config.use_shard_serialization(hashing_algorithm=algorithm, shard_size=1000)  # type: ignore[arg-type]
    elif method == "files":
        config.use_file_serialization(hashing_algorithm="blake3")
    path = bundle_path / "manifest.json" if hashing == "one file" else bundle_path
    signature_path = bundle_path.with_name("model.sig")
    signing.Config().use_elliptic_key_signer(private_key=signer.key).set_hashing_config(config).sign(
        path, signature_path
    )
    shutil.move(signature_path, bundle_path / "model.sig")
    if hashing == "one file":
        with pytest.raises(SignatureError):
            stagepack.open(bundle_path, require_signature=signer.public_key)
    else:
        stagepack.verify(bundle_path, require_signature=signer.public_key)
        rewrite_manifest(bundle_path)
        with pytest.raises(SignatureError, match="is not the one that was signed"):
            stagepack.open(bundle_path, require_signature=signer.public_key)


def test_the_signature_of_a_remote_bundle_is_verified(
    bundle_path: Path, signer: Signer, stranger: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    with HttpServer(tmp_path) as server:
        url = f"{server.url}/tiny.stagepack"
        with pytest.raises(SignatureError) as caught:
            stagepack.open(url, require_signature=signer.public_key)
        assert caught.value.reason == "unsigned"
        stagepack.sign(bundle_path, key=signer.key)
        bundle = stagepack.open(url, require_signature=signer.public_key)
        stagepack.load(url, require_signature=signer.public_key)
        with pytest.raises(SignatureError) as caught:
            stagepack.load(bundle, require_signature=stranger.public_key)
        assert caught.value.reason == "untrusted"
        assert run("pull", url, "-o", tmp_path / "pulled").exit_code == 0
    stagepack.verify(tmp_path / "pulled", require_signature=signer.public_key)
    with pytest.raises(OptionError, match="download the bundle first"):
        stagepack.sign(url, key=signer.key)


def test_a_bundle_that_is_not_in_order_is_not_signed(bundle_path: Path, signer: Signer) -> None:
    change_weights(bundle_path)
    with pytest.raises(DigestError):
        stagepack.sign(bundle_path, key=signer.key)
    assert not (bundle_path / "model.sig").exists()
    assert sorted(path.name for path in bundle_path.parent.iterdir()) == ["tiny.stagepack"]


def test_another_manifest_than_the_opened_one_is_not_signed(bundle_path: Path, signer: Signer) -> None:
    bundle = stagepack.open(bundle_path)
    rewrite_manifest(bundle_path)
    with pytest.raises(DigestError, match=r"manifest.json: was changed after the bundle was opened, so that it is not"):
        stagepack.sign(bundle, key=signer.key)
    assert not (bundle_path / "model.sig").exists()
    assert sorted(path.name for path in bundle_path.parent.iterdir()) == ["tiny.stagepack"]


def test_a_signature_is_replaced_only_on_request(bundle_path: Path, signer: Signer, stranger: Signer) -> None:
    assert run("sign", bundle_path, "--key", signer.key).exit_code == 0
    with pytest.raises(OutputExistsError, match="is signed already"):
        stagepack.sign(bundle_path, key=stranger.key)
    stagepack.verify(bundle_path, require_signature=signer.public_key)
    assert run("sign", bundle_path, "--key", stranger.key, "--overwrite").exit_code == 0
    stagepack.verify(bundle_path, require_signature=stranger.public_key)


def test_files_that_are_no_keys_are_bad_options(
    bundle_path: Path, signer: Signer, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no key")
    for bad_key in (tmp_path / "missing", tmp_path / "text", signer.public_key):
        with pytest.raises(OptionError):
            stagepack.sign(bundle_path, key=bad_key)
    with pytest.raises(OptionError, match="does not match"):
        stagepack.sign(bundle_path, key=signer.key, certificate=authority.certificate)
    with pytest.raises(OptionError, match="the certificate of the key too"):
        stagepack.sign(bundle_path, key=signer.key, certificate_chain=[authority.chain])
    stagepack.sign(bundle_path, key=signer.key)
    for bad_file in (tmp_path / "missing", tmp_path / "text", signer.key, ()):
        with pytest.raises(OptionError):
            stagepack.open(bundle_path, require_signature=bad_file)
    with pytest.raises(OptionError, match="leave out verify='manifest'"):
        stagepack.load(bundle_path, verify="manifest", require_signature=signer.public_key)
    with pytest.raises(OptionError, match="without_digests"):
        stagepack.load(stagepack.open(bundle_path).without_digests(), require_signature=signer.public_key)
    result = run("load", bundle_path, "--verify", "off", "--require-signature", signer.public_key)
    assert result.exit_code == 2
    assert "requires --verify full" in result.stderr


def test_a_change_of_a_signed_bundle_says_that_the_signature_is_gone(bundle_path: Path, signer: Signer) -> None:
    stagepack.sign(bundle_path, key=signer.key)
    bundle = stagepack.open(bundle_path)
    with BundleWriter(bundle_path, overwrite=True) as writer:
        for entry in bundle.manifest.files:
            writer.link_file(bundle_path / entry.name, entry)
        with pytest.warns(ExportWarning, match="sign it again"):
            writer.finish(bundle.manifest)
    with pytest.raises(SignatureError) as caught:
        stagepack.open(bundle_path, require_signature=signer.public_key)
    assert caught.value.reason == "unsigned"
