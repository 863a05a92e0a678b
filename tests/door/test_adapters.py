"""Where PEFT is not installed, an adapter says what to do. `tests/libraries` has the tests with PEFT."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stagepack
from stagepack.errors import CaptureError, MissingPackageError
from tests.door.model import EXAMPLE, Scale
from tests.zoo.architectures.encoders import minilm_folder


def test_an_adapter_without_peft_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    configuration = tmp_path / "adapter_config.json"
    configuration.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": minilm_folder()}))
    with pytest.raises(MissingPackageError, match=r"is an adapter of PEFT, .* pip install peft") as caught:
        stagepack.export(tmp_path, out=tmp_path / "m.stagepack")
    assert caught.value.name == "peft"
    for content, message in (
        ("[]", "expected the configuration"),
        ("{}", "base_model_name_or_path, found none: add it"),
    ):
        configuration.write_text(content)
        with pytest.raises(CaptureError, match=message):
            stagepack.export(tmp_path, out=tmp_path / "m.stagepack")


def test_the_weights_of_an_adapter_alone_name_its_folder(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    save_file({"base_model.model.first.lora_A.weight": torch.ones(2, 64)}, tmp_path / "adapter_model.safetensors")
    message = "of an adapter of PEFT: give the folder of the adapter"
    with pytest.raises(CaptureError, match=message):
        stagepack.export(tmp_path / "adapter_model.safetensors", graph_from=exported[0], out=tmp_path / "m.stagepack")
    with pytest.raises(CaptureError, match=message):
        stagepack.export(
            Scale, (EXAMPLE,), weights=tmp_path / "adapter_model.safetensors", out=tmp_path / "m.stagepack"
        )
