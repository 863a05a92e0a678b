"""Where PEFT is not installed, an adapter says what to do. `tests/libraries` has the tests with PEFT."""

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from transformers.utils.import_utils import is_peft_available

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


def test_a_base_model_that_is_not_found_names_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace())
    (configuration := tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "llama"}')
    message = re.escape(
        f"{tmp_path}: is an adapter of the base model 'llama': llama: there is no such folder, and the Hugging Face Hub, where a model of "
        "this name may be, cannot be reached: check the path, or the connection: write where it is into base_model_name_or_path of "
        f"{configuration}"
    )
    with pytest.raises(CaptureError, match=f"^{message}$"):
        stagepack.export(tmp_path, out=tmp_path / "m.stagepack")


@pytest.mark.parametrize(
    ("names", "more"), [(["a.lora_A"], ""), (["a.lora_A", "b.lora_A", "c.lora_A"], ", and 2 more")]
)
def test_tensors_that_fit_no_base_model_are_counted(
    names: list[str], more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: Any = SimpleNamespace(
        active_adapter="default", active_peft_config=SimpleNamespace(is_prompt_learning=False)
    )
    adapted.load_adapter = lambda *_: SimpleNamespace(unexpected_keys=names, missing_keys=[])
    adapted.merge_and_unload = lambda: adapted
    is_peft_available()  # transformers keeps its first answer, also for the tests after this one
    # Others ask for the specification of a module, and whether its package is installed, which it is not.
    peft = SimpleNamespace(
        PeftModel=SimpleNamespace(from_pretrained=lambda *_: adapted), __spec__=ModuleSpec("peft", None)
    )
    monkeypatch.setitem(sys.modules, "peft", peft)
    base_model = minilm_folder()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base_model}))
    message = re.escape(
        f"{base_model}: a.lora_A is in one of them alone{more}: correct base_model_name_or_path in its "
    )
    with pytest.raises(CaptureError, match=message):
        stagepack.export(tmp_path, out=tmp_path / "m.stagepack")


def test_the_weights_of_an_adapter_alone_name_its_folder(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    save_file({"base_model.model.first.lora_A.weight": torch.ones(2, 64)}, tmp_path / "adapter_model.safetensors")
    message = "of an adapter of PEFT: give the folder of the adapter"
    with pytest.raises(CaptureError, match=message):
        stagepack.export(tmp_path / "adapter_model.safetensors", graph_from=exported[0], out=tmp_path / "m.stagepack")
    with pytest.raises(CaptureError, match=message):
        stagepack.export(Scale, (EXAMPLE,), weights=tmp_path / "adapter_model.safetensors", out=tmp_path / "m")
