"""Remote bundles without a network, and without credentials."""

import json
import os
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import DigestError, MissingPackageError, NotABundleError, OptionError, RemoteError
from stagepack.remote.cache import Cache
from tests.door.model import EXAMPLE
from tests.door.test_folders import hub_cache
from tests.text.generating_model import tokenizer
from tools.benchmark_models import llama


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def snapshot(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """The snapshot of the repository me/m in the Hub's cache."""
    return cached_snapshot(exported[0], tmp_path)


def cached_snapshot(source: Path, cache: Path, name: str = "m") -> Path:
    """Put a folder into the Hub's cache as the main revision of the repository me/NAME."""
    path = hub_cache(source, cache, name)
    (refs := path.parents[1] / "refs").mkdir()
    (refs / "main").write_text(path.name)
    return path


def test_a_hub_name_has_its_tokenizer_and_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama"
    llama(layers=1, hidden=32, intermediate=48, heads=4, kv_heads=4, vocab_size=64).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    cached_snapshot(folder, tmp_path)
    found = stagepack.export("me/m", out=tmp_path / "name.stagepack")
    assert found.digest == stagepack.export(folder, out=tmp_path / "folder.stagepack").digest
    assert "tokenizer.json" in found.files
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "me/m"}))
    cached_snapshot(adapter, tmp_path, "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackageError, match=r"^me/adapter: is an adapter of PEFT, .* pip install peft"):
        stagepack.export("me/adapter", out=tmp_path / "m.stagepack")


def test_a_url_of_the_hub_is_its_snapshot_when_offline(exported: tuple[Path, torch.Tensor], snapshot: Path) -> None:
    digest = stagepack.open(exported[0]).digest
    for url in ("hf://me/m", "hf://me/m@main", f"hf://me/m@{snapshot.name}"):
        bundle = stagepack.open(url, digest=digest)
        assert bundle.path == snapshot
        assert bundle.location == url
    stagepack.verify("hf://me/m")
    for options in ({}, {"stream": True}, {"verify": "off"}):
        assert torch.equal(stagepack.load("hf://me/m", **options)(EXAMPLE), exported[1])
    with pytest.raises(DigestError, match="correct the digest"):
        stagepack.open("hf://me/m", digest="0" * 64)
    with pytest.raises(OptionError, match="hf://me/m: assets are written into the bundle: download it first"):
        stagepack.remove_assets("hf://me/m", ["config.json"])


def test_what_no_cache_has_is_named_when_offline(snapshot: Path) -> None:
    command = "'hf download me/m --revision v2'"
    with pytest.raises(RemoteError, match=f"^hf://me/m@v2: HF_HUB_OFFLINE is set, .* has manifest.json: .*{command}$"):
        stagepack.open("hf://me/m@v2")
    (snapshot / "stage-1.safetensors").unlink()
    stagepack.load_stage("hf://me/m", 0)
    with pytest.raises(RemoteError, match=r"^hf://me/m: HF_HUB_OFFLINE is set, and .* has stage-1.safetensors"):
        stagepack.load_stage("hf://me/m", 1)


def test_a_model_in_the_cache_is_told_from_a_bundle_when_offline(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    snapshot = cached_snapshot(model, tmp_path)
    result = CliRunner().invoke(main, ["load", "hf://me/m"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"stagepack: hf://me/m: not a stagepack bundle: expected a manifest.json in its snapshot {snapshot}, found config.json: it is a "
        "model and no bundle: 'stagepack export me/m -o FOLDER' writes a bundle of it [M1]\n"
    )


def test_a_hub_that_cannot_be_reached_is_named_and_its_cache(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    unreachable = {"endpoint": "http://127.0.0.1:1"}
    reason = "the Hugging Face Hub cannot be reached: ConnectError: .*: check the connection"
    with pytest.raises(RemoteError, match=f"^hf://me/absent: {reason}$"):
        stagepack.open("hf://me/absent", storage_options=unreachable)
    cure = ", or set HF_HUB_OFFLINE=1 to use the snapshot in its cache on this machine"
    with pytest.raises(RemoteError, match=f"^hf://me/m: {reason}{cure}$"):
        stagepack.open("hf://me/m", storage_options=unreachable)


def test_the_folder_of_a_repository_in_the_cache_names_its_snapshot(snapshot: Path) -> None:
    message = f"found a repository in the cache of the Hugging Face Hub: give the snapshot in it: {snapshot} "
    with pytest.raises(NotABundleError, match=message):
        stagepack.open(snapshot.parents[1])


def test_a_bundle_that_was_opened_before_is_opened_when_offline(
    exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    cache, digest = Cache(tmp_path / "cache"), stagepack.open(exported[0]).digest
    shutil.copytree(exported[0], cache.bundle_folder(digest))
    os.close(cache.use(digest, "hf://me/m") or 0)
    assert stagepack.open("hf://me/m").digest == digest


def test_s3_without_credentials_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    result = CliRunner().invoke(main, ["inspect", "s3://bucket/m"])
    assert result.exit_code == 1
    assert (
        "s3://bucket/m/manifest.json: NoCredentialsError: Unable to locate credentials: set AWS_ACCESS_KEY_ID"
        in result.stderr
    )
    assert "tried" not in result.stderr
