"""Deltas are signed, verified, shown, compared, and downloaded as bundles are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from stagepack.errors import DigestError, FormatError, NotABundleError, OptionError, SignatureError
from tests.deltas.conftest import Versions
from tests.deltas.test_roads import assert_same_folder
from tests.remote.http_server import HttpServer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeeded(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_write_show_and_apply_deltas(versions: Versions, tmp_path: Path) -> None:
    step, out = tmp_path / "step.delta", tmp_path / "m.stagepack"
    shown = json.loads(succeeded("delta", versions.a, versions.b, "-o", step, "--version", "7", "--json"))
    assert (shown["version"], shown["graphs_changed"]) == ("7", [])
    assert "already exists" in run("delta", versions.a, versions.b, "-o", step).output
    succeeded("delta", versions.a, versions.b, "-o", step, "--overwrite", "--version", "8")
    assert "a delta, version 8" in succeeded("inspect", step)
    assert json.loads(succeeded("inspect", step, "--json"))["result"] == stagepack.open(versions.b).digest
    succeeded("verify", step, "--strict")
    succeeded("apply", versions.a, step, versions.b_to_c, "-o", out)
    assert_same_folder(out, versions.c)
    shutil.copytree(versions.a, tmp_path / "place.stagepack")
    succeeded("apply", tmp_path / "place.stagepack", step, "--in-place")
    assert_same_folder(tmp_path / "place.stagepack", versions.b)
    assert "expected one of -o FOLDER and --in-place" in run("apply", versions.a, step).output
    compared = run("diff", versions.a, step)
    assert compared.exit_code == 1
    assert "1.weight" in compared.output
    assert run("diff", versions.b, tmp_path / "place.stagepack").exit_code == 0
    assert "largest difference 0" in succeeded("load", versions.a, "--delta", step, "--delta", versions.b_to_c)
    assert stagepack.open(versions.b).digest in succeeded("inspect", versions.a, "--delta", step)
    assert stagepack.open(versions.b).digest in succeeded("verify", versions.a, "--delta", step, "--run")


def test_a_delta_is_no_bundle_and_a_bundle_no_delta(versions: Versions, tmp_path: Path) -> None:
    with pytest.raises(NotABundleError, match="found a delta: apply it"):
        stagepack.open(versions.a_to_b)
    with pytest.raises(NotABundleError, match="expected a delta, found a bundle"):
        stagepack.load(versions.a, deltas=[versions.b])
    composed = stagepack.open(versions.a, deltas=[versions.a_to_b])
    for refused in (
        lambda: stagepack.recut(composed, out=tmp_path / "m", stages=1),
        lambda: stagepack.sign(composed, key=tmp_path / "key.pem"),
        lambda: stagepack.delta(versions.a, composed, out=tmp_path / "m"),
        lambda: stagepack.open(versions.a, deltas=[]) and stagepack.add_assets(composed, [str(tmp_path / "x")]),
    ):
        with pytest.raises(OptionError, match="is composed of deltas"):
            refused()


def test_what_is_damaged_is_named(versions: Versions, tmp_path: Path) -> None:
    base = Path(shutil.copytree(versions.a, tmp_path / "a.stagepack"))
    delta = Path(shutil.copytree(versions.a_to_b, tmp_path / "b.delta"))
    weights = max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    changes = delta / f"{weights.name}.changes"
    for path, expected in ((weights, f"^{base}.*{weights.name}: the content"), (changes, rf"b\.delta: {changes.name}")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        for attempt in (
            lambda: stagepack.load(base, deltas=[delta]),
            lambda: stagepack.verify(stagepack.open(base, deltas=[delta])),
            lambda: stagepack.apply_deltas(base, [delta], out=tmp_path / "m.stagepack"),
        ):
            with pytest.raises(FormatError, match=expected):
                attempt()
        streamed = stagepack.load(base, deltas=[delta], stream=True)
        with pytest.raises(FormatError, match=weights.name):
            streamed(torch.ones(2, 64, dtype=torch.bfloat16))
        content[-1] ^= 1
        path.write_bytes(content)
    assert not (tmp_path / "m.stagepack").exists()
    stagepack.load(base, deltas=[delta])


def test_the_damaged_base_is_named_before_a_delta_is_made(versions: Versions, tmp_path: Path) -> None:
    base = Path(shutil.copytree(versions.a, tmp_path / "a.stagepack"))
    weights = max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.raises(DigestError, match="the content of the old version was changed"):
        stagepack.delta(base, versions.b, out=tmp_path / "d")
    with pytest.raises(DigestError, match="the content of the new version was changed"):
        stagepack.delta(versions.b, base, out=tmp_path / "d")


def test_signatures(versions: Versions, tmp_path: Path) -> None:
    pytest.importorskip(
        "model_signing", reason="signatures are not tested: pip install '.[sign]' installs model_signing"
    )
    from tests.signing.signers import make_signer

    signer, stranger = make_signer(tmp_path, "release"), make_signer(tmp_path, "stranger")
    base = Path(shutil.copytree(versions.a, tmp_path / "a.stagepack"))
    delta = Path(shutil.copytree(versions.a_to_b, tmp_path / "b.delta"))
    stagepack.sign(base, key=signer.key)
    with pytest.raises(SignatureError, match=r"b\.delta: expected a signed delta"):
        stagepack.load(base, deltas=[delta], require_signature=signer.public_key)
    succeeded("sign", delta, "--key", signer.key)
    assert "verified with" in succeeded("verify", delta, "--require-signature", signer.public_key)
    stagepack.load(base, deltas=[delta], require_signature=signer.public_key)
    with pytest.raises(SignatureError):
        stagepack.load(base, deltas=[delta], require_signature=stranger.public_key)
    with pytest.raises(OptionError, match="give the base and its deltas in one call"):
        stagepack.load(stagepack.open(base, deltas=[delta]), require_signature=signer.public_key)
    (delta / "result.json").write_bytes((delta / "result.json").read_bytes() + b" ")
    with pytest.raises(DigestError):
        stagepack.load(base, deltas=[delta], require_signature=signer.public_key)


@pytest.mark.process
def test_deltas_at_a_url(versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with HttpServer(versions.folder) as server, torch.no_grad():
        delta = stagepack.open_delta(f"{server.url}/b.delta")
        assert torch.equal(stagepack.load(versions.a, deltas=[delta])(x), versions.model("b")(x))
        remote = stagepack.load(f"{server.url}/a.stagepack", deltas=[delta, f"{server.url}/c.delta"])
        assert torch.equal(remote(x), versions.model("c")(x))
        succeeded("pull", f"{server.url}/c.delta", "-o", tmp_path / "c.delta")
        assert "is there already" in succeeded("pull", f"{server.url}/c.delta", "-o", tmp_path / "c.delta")
        assert run("pull", f"{server.url}/b.delta", "-o", tmp_path / "c.delta").exit_code == 1
    assert_same_folder(tmp_path / "c.delta", versions.b_to_c)


def test_onnx_runtime_loads_composed_bundles(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 2)).eval()
    x = torch.randn(2, 8)
    for name in "ab":
        stagepack.export(model, (x,), out=tmp_path / name, stages=2, onnx=True)
        expected = model(x)
        torch.nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
    stagepack.delta(tmp_path / "a", tmp_path / "b", out=tmp_path / "d")
    found = stagepack.load(tmp_path / "a", deltas=[tmp_path / "d"], runtime="onnxruntime")(x)
    torch.testing.assert_close(found, expected)
