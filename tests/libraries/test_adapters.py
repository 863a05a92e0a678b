"""Adapters of PEFT: folders are merged into their base models, and models with adapters are exported as they are."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import stagepack
from stagepack.errors import CaptureError, OptionError
from tests.door.test_hub import cached_snapshot
from tests.text.generating_model import tokenizer

peft: Any = pytest.importorskip("peft", reason="make test-libraries installs it")
pytestmark = pytest.mark.filterwarnings("default")  # PEFT calls what transformers has deprecated

PROMPT = torch.tensor([[5, 9, 31, 42]])


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """A Llama with an adapter, which is saved into one folder, and its base model with a tokenizer into another."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).save_pretrained(
        tmp_path / "base"
    )
    (tmp_path / "base" / "tokenizer.json").write_text(tokenizer().to_str())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    return model


def saved_names(bundle: stagepack.Bundle) -> set[str]:
    return {
        name
        for graph in bundle.graphs()
        for weight in graph.weights
        for name in weight.names
        if weight.kind == "parameter"
    }


def test_the_folder_of_an_adapter_becomes_the_merged_model(adapted: Any, tmp_path: Path) -> None:
    base = stagepack.export(tmp_path / "base", out=tmp_path / "base.stagepack", stages=2)
    found = stagepack.export(tmp_path / "adapter", out=tmp_path / "m.stagepack", split_at=["model.layers.1"])
    again = stagepack.export(tmp_path / "adapter", graph_from=base, out=tmp_path / "again.stagepack")
    merged = adapted.merge_and_unload()
    for bundle in (found, again):
        assert saved_names(bundle) == dict(merged.named_parameters()).keys()
        answer = stagepack.load(bundle)(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
        assert torch.equal(answer["logits"], merged(input_ids=PROMPT).logits)
    # Files of the base model, and files beside the adapter.
    assert {"tokenizer.json", "chat_template.jinja"} <= set(found.files)
    graph = found.graph(0)
    assert all(weight.trainable for weight in graph.weights if weight.kind == "parameter")


def test_the_hub_name_of_an_adapter_becomes_the_merged_model(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached_snapshot(tmp_path / "base", tmp_path, "base")
    configuration = tmp_path / "adapter" / "adapter_config.json"
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"base_model_name_or_path": "me/base"}))
    cached_snapshot(tmp_path / "adapter", tmp_path, "adapter")
    found = stagepack.export("me/adapter", out=tmp_path / "m.stagepack")
    merged = adapted.merge_and_unload()
    answer = stagepack.load(found)(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    assert torch.equal(answer["logits"], merged(input_ids=PROMPT).logits)
    assert {"tokenizer.json", "chat_template.jinja"} <= set(found.files)


def test_the_folder_of_an_adapter_generates(adapted: Any, tmp_path: Path) -> None:
    bundle = stagepack.export(tmp_path / "adapter", out=tmp_path / "m.stagepack", generate=16)
    found = stagepack.load(bundle).generate(PROMPT, max_new_tokens=4)
    expected = adapted.merge_and_unload().generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)


def test_a_model_with_an_adapter_keeps_its_own_names(adapted: Any, tmp_path: Path) -> None:
    bundle = stagepack.export(adapted, kwargs={"input_ids": PROMPT}, out=tmp_path / "m.stagepack")
    assert saved_names(bundle) == dict(adapted.named_parameters()).keys()
    assert torch.equal(stagepack.load(bundle)(input_ids=PROMPT)["logits"], adapted(input_ids=PROMPT).logits)
    says = r"found PeftModelForCausalLM: merge its adapter before, by model\.merge_and_unload"
    with pytest.raises(OptionError, match=says):
        stagepack.export(adapted, out=tmp_path / "n.stagepack", generate=16)


def test_an_adapter_brings_the_head_of_its_task(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    BertModel(BertConfig(**config, num_attention_heads=2)).save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, task_type="SEQ_CLS")).eval()
    model.save_pretrained(tmp_path / "adapter")
    bundle = stagepack.export(tmp_path / "adapter", out=tmp_path / "m.stagepack")
    answer = stagepack.load(bundle)(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    assert torch.equal(answer["logits"], model.merge_and_unload()(input_ids=PROMPT).logits)


def test_an_adapter_that_fits_no_base_model_is_refused(adapted: Any, tmp_path: Path) -> None:
    path = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(path.read_text())
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(tmp_path / "smaller")
    for base, message in (
        (str(tmp_path / "smaller"), r"adapter: does not fit .*smaller: \S+ is in one of them alone, and 3 more"),
        (
            str(tmp_path / "gone"),
            r"is an adapter of the base model '.*gone': .* no such file or folder.*: write where it is into base_model",
        ),
    ):
        path.write_text(json.dumps(fields | {"base_model_name_or_path": base}))
        with pytest.raises(CaptureError, match=message):
            stagepack.export(tmp_path / "adapter", out=tmp_path / "m.stagepack")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), prompts).save_pretrained(
        tmp_path / "prompts"
    )
    says = "kind PROMPT_TUNING has no weights to merge: load it, and pass the PeftModel"
    with pytest.raises(CaptureError, match=says):
        stagepack.export(tmp_path / "prompts", out=tmp_path / "m.stagepack")
