"""Adapters are signed and verified as bundles are; where a signature is required, each adapter must have one, too."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stagepack
from stagepack.errors import AdapterError, DigestError, OptionError, SignatureError
from stagepack.named_adapters import pinned_adapters
from tests.adapters.lora import write_tiny_adapter
from tests.bundle_editor import BundleEditor

pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing")

from tests.signing.signers import model_signing, run

if TYPE_CHECKING:
    from tests.signing.signers import Signer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapter(tmp_path_factory.mktemp("written") / "pirate")


@pytest.fixture
def adapter_path(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "pirate"))


@pytest.fixture
def signed_bundle(bundle_path: Path, signer: "Signer") -> Path:
    stagepack.sign(bundle_path, key=signer.key)
    return bundle_path


def test_an_adapter_is_signed_and_verified(adapter_path: Path, signer: "Signer", stranger: "Signer") -> None:
    digest = stagepack.open_adapter(adapter_path).digest
    done = run("sign", adapter_path, "--key", signer.key)
    assert done.exit_code == 0, done.output
    assert "signed 2 files" in done.output
    assert stagepack.open_adapter(adapter_path).digest == digest
    done = run("verify", adapter_path, "--require-signature", signer.public_key, "--strict")
    assert done.exit_code == 0, done.output
    assert "signature: verified with" in done.output
    stagepack.verify(adapter_path, require_signature=signer.public_key)
    signature = ("--signature", adapter_path / "model.sig", "--public_key", signer.public_key)
    assert model_signing("verify", "key", adapter_path, *signature).exit_code == 0
    with pytest.raises(SignatureError) as refusal:
        stagepack.verify(adapter_path, require_signature=stranger.public_key)
    assert refusal.value.reason == "untrusted"


@pytest.mark.parametrize("processes", [False, pytest.param(2, marks=pytest.mark.process)])
def test_each_adapter_must_be_signed(
    processes: Any, signed_bundle: Path, adapter_path: Path, signer: "Signer", stranger: "Signer", tmp_path: Path
) -> None:
    other = Path(shutil.copytree(adapter_path, tmp_path / "other"))
    options: dict[str, Any] = {"require_signature": signer.public_key, "processes": processes}
    stagepack.sign(adapter_path, key=signer.key)
    for adapters, reason in (([other], "unsigned"), ([adapter_path, other], "unsigned")):
        with pytest.raises(SignatureError) as refusal:
            stagepack.load(signed_bundle, adapters=adapters, **options)
        assert (refusal.value.reason, "other: expected a signed" in str(refusal.value)) == (reason, True)
    stagepack.sign(other, key=stranger.key)
    with pytest.raises(SignatureError) as refusal:
        stagepack.load(signed_bundle, adapters={"x": other}, **options)
    assert refusal.value.reason == "untrusted"
    stagepack.sign(other, key=signer.key, overwrite=True)
    pipeline = stagepack.load(signed_bundle, adapters=[adapter_path, other], **options)
    assert pipeline.adapters == ("pirate", "other")
    if processes:
        pipeline.close()


def test_commands_require_the_signature(signed_bundle: Path, adapter_path: Path, signer: "Signer") -> None:
    arguments = ("load", signed_bundle, "--adapter", adapter_path, "--require-signature", signer.public_key)
    done = run(*arguments)
    assert (done.exit_code, "expected a signed adapter, found no model.sig" in done.output) == (1, True)
    stagepack.sign(adapter_path, key=signer.key)
    assert run(*arguments).exit_code == 0


def test_an_adapter_that_was_changed_after_it_was_signed_is_refused(
    signed_bundle: Path, adapter_path: Path, signer: "Signer", tmp_path: Path
) -> None:
    stagepack.sign(adapter_path, key=signer.key)
    signature = adapter_path / "model.sig"
    other = write_tiny_adapter(tmp_path / "other", seed=1)
    shutil.copy(signature, other)
    with pytest.raises(SignatureError, match=r"manifest\.json is not the one that was signed") as refusal:
        stagepack.load(signed_bundle, adapters=[other], require_signature=signer.public_key)
    assert refusal.value.reason == "changed"
    tensors = adapter_path / "adapter.safetensors"
    shutil.copy(other / tensors.name, tensors)
    with pytest.raises(DigestError, match="the content was changed"):
        stagepack.load(signed_bundle, adapters=[adapter_path], require_signature=signer.public_key)


def test_a_digest_pins_an_adapter(bundle_path: Path, adapter_path: Path) -> None:
    digest = stagepack.open_adapter(adapter_path).digest
    pinned = f"{adapter_path}@sha256:{digest}"
    for adapters in ([pinned], {"pirate": pinned}, [f"pirate={pinned}"], [stagepack.open_adapter(adapter_path)]):
        assert stagepack.load(bundle_path, adapters=adapters).adapters == ("pirate",)
    with pytest.raises(DigestError, match=f"expected the adapter of the digest {'0' * 64}, found {digest}"):
        stagepack.load(bundle_path, adapters=[f"{adapter_path}@sha256:{'0' * 64}"])
    with pytest.raises(DigestError, match="expected the adapter of the digest"):
        stagepack.open_adapter(stagepack.open_adapter(adapter_path), digest="0" * 64)
    wrong: Any
    for wrong in ([1], [None], [b"x"], "pirate", [f"{adapter_path}@sha256:1"], ["=x"], [""]):
        with pytest.raises((OptionError, stagepack.errors.NotABundleError)):
            stagepack.load(bundle_path, adapters=wrong)


@pytest.mark.process
def test_a_server_requires_the_signature(signed_bundle: Path, adapter_path: Path, signer: "Signer") -> None:
    command: list[str | Path] = [sys.executable, "-m", "stagepack", "serve", signed_bundle, "--adapter", adapter_path]
    done = subprocess.run(
        [*command, "--require-signature", signer.public_key], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "pirate: expected a signed adapter, found no model.sig" in done.stderr
    assert "Traceback" not in done.stderr


def test_adapters_of_other_bundles_are_left_out_by_a_server(
    bundle_path: Path, adapter_path: Path, signer: "Signer", tmp_path: Path
) -> None:
    bundle = stagepack.open(bundle_path)
    editor = BundleEditor.copy(adapter_path, tmp_path / "other")
    editor.write_manifest(editor.manifest() | {"base": "1" * 64})
    given = [str(adapter_path), str(editor.path)]
    digest = stagepack.open_adapter(adapter_path).digest
    assert pinned_adapters(bundle, given, fitting=True) == [f"pirate={adapter_path}@sha256:{digest}"]
    with pytest.raises(SignatureError, match="expected a signed adapter"):
        pinned_adapters(bundle, given, signer.public_key, fitting=True)
    with pytest.raises(AdapterError, match="is an adapter of the bundle 111111111111"):
        pinned_adapters(bundle, given)
