"""A tokenizer is in each bundle of a Hugging Face folder, and can be added later without another export."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import BertConfig, BertModel

import stagepack
from stagepack.cli import main
from stagepack.errors import FileNotListedError, OptionError, OutputExistsError
from tests.text.generating_model import tokenizer


@pytest.fixture
def bundle_path(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of the bundle that tests may change."""
    return stagepack.recut(exported[0], out=tmp_path / "m.stagepack", stages=2).path


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    (path := tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
    return path


def asset(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["asset", *map(str, arguments)])


def test_a_bundle_of_a_hugging_face_folder_has_its_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / "bert" / name).write_text(f"the {name} of the model")
    (tmp_path / "tokenizer_config.json").write_text("another one")
    bundle = stagepack.export(str(tmp_path / "bert"), out=tmp_path / "b", assets=[tmp_path / "tokenizer_config.json"])
    assert bundle.read("tokenizer.json") == b"the tokenizer.json of the model"
    assert bundle.read("vocab.txt") == b"the vocab.txt of the model"
    assert bundle.read("tokenizer_config.json") == b"another one"


def test_an_asset_is_added_listed_and_removed(bundle_path: Path, tokenizer_path: Path) -> None:
    before = stagepack.open(bundle_path)
    weight_file = bundle_path / "stage-0.safetensors"
    inode = weight_file.stat().st_ino
    added = asset("add", bundle_path, tokenizer_path, "--json")
    assert added.exit_code == 0, added.output
    facts = json.loads(added.stdout)
    bundle = stagepack.open(bundle_path)
    assert facts == {
        "bundle": str(bundle_path),
        "digest": bundle.digest,
        "assets": {"tokenizer.json": tokenizer_path.stat().st_size},
    }
    assert weight_file.stat().st_ino == inode
    bundle.verify(strict=True)
    assert "tokenizer.json" in asset("list", bundle_path).output
    assert asset("remove", bundle_path, "tokenizer.json").exit_code == 0
    assert stagepack.open(bundle_path).digest == before.digest


def test_an_asset_that_lies_in_the_folder_already_is_taken(bundle_path: Path, tokenizer_path: Path) -> None:
    tokenizer_path.rename(bundle_path / "tokenizer.json")
    stagepack.add_assets(bundle_path, [bundle_path / "tokenizer.json"]).verify(strict=True)


def test_what_cannot_be_added_or_removed_is_named(bundle_path: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    digest = stagepack.add_assets(bundle_path, tokenizer_path).digest
    with pytest.raises(OutputExistsError, match=r"has tokenizer.json already: .*overwrite=True"):
        stagepack.add_assets(bundle_path, [tokenizer_path])
    assert stagepack.add_assets(bundle_path, [tokenizer_path], overwrite=True).digest == digest
    with pytest.raises(FileNotListedError, match=r"which are tokenizer.json, found stage-0.msgpack"):
        stagepack.remove_assets(bundle_path, ["stage-0.msgpack"])
    with pytest.raises(OptionError, match=r"expected a file, found a folder: give its files, such as .*tokenizer.json"):
        stagepack.add_assets(bundle_path, [tmp_path])
    (odd := tmp_path / "my tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match=r"expected a name of letters"):
        stagepack.add_assets(bundle_path, [odd])
    (bundle_path / "notes").write_text("mine")
    assert "notes" in asset("add", bundle_path, tokenizer_path, "--overwrite").stderr
    assert stagepack.open(bundle_path).digest == digest


def test_an_asset_added_to_a_signed_bundle_removes_the_signature_with_a_warning(
    bundle_path: Path, tokenizer_path: Path
) -> None:
    (bundle_path / "model.sig").write_text("{}")
    added = asset("add", bundle_path, tokenizer_path)
    assert added.exit_code == 0
    assert (
        "the bundle was signed, and is not any more, because it has changed: sign it again (stagepack sign)"
        in added.stderr
    )
    assert not (bundle_path / "model.sig").exists()
