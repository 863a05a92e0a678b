"""Adapters of PEFT over bundles: unmerged answers have the bits of its forward, merged ones those of its `merge_and_unload`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import stagepack
from stagepack.errors import AdapterError
from tests.adapters.models import export_model, logits, make_model
from tests.zoo.architectures.encoders import minilm_encoder_folder

peft: Any = pytest.importorskip("peft", reason="make test-libraries installs it")
pytestmark = pytest.mark.filterwarnings("default")  # PEFT calls what transformers has deprecated

CLASSES: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForSequenceClassification,
}
# Name of the model, settings of the adapter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "some linear layers": ("llama", {"target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}),
    "all linear layers": (
        "llama",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"v_proj": 5},
        },
    ),
    "the embedding and the head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "a pattern, and a whole head": (
        "llama",
        {"target_modules": r".*layers\.1.*proj", "modules_to_save": ["lm_head"], "lora_dropout": 0.1},
    ),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"]}),
    "a tied head": ("gpt2", {"target_modules": ["lm_head"]}),
    "both embeddings": ("gpt2", {"target_modules": ["wte", "wpe"]}),
    "all biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "biases of their own": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only", "lora_bias": True}),
    "a classifier": ("bert", {"task_type": "SEQ_CLS"}),
    "all linear layers and biases": ("bert", {"target_modules": "all-linear", "bias": "all"}),
}


def save_adapter(folder: Path, model_class: Any, seed: int = 0, name: str = "lora", **settings: Any) -> Path:
    """An adapter of the model in a folder with random weights, also those that training would change."""
    torch.manual_seed(seed)
    base = model_class.from_pretrained(folder / "model")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            is_bias = weight_name.endswith("bias") and settings.get("bias", "none") != "none"
            if "modules_to_save" in weight_name or is_bias:
                parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder / name)
    return folder / name


def loaded(folder: Path, model_class: Any) -> Any:
    return peft.PeftModel.from_pretrained(model_class.from_pretrained(folder / "model"), folder / "lora").eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_answers_have_the_bits_of_peft(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, settings = CASES[case]
    bundle = export_model(make_model(name, dtype), tmp_path, stages=2)
    lora = save_adapter(tmp_path, CLASSES[name], **settings)
    adapter = stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    assert adapter.document.changes
    model = loaded(tmp_path, CLASSES[name])
    expected = logits(model)
    assert torch.equal(logits(stagepack.load(bundle, adapters=[adapter.path]), adapter="a"), expected)

    merged_bundle = stagepack.merge_adapter(bundle, adapter.path, out=tmp_path / "merged.stagepack")
    merged = model.merge_and_unload()
    pipeline = stagepack.load(merged_bundle)
    stored, parameters = pipeline.state_dict(), dict(merged.named_parameters())
    assert stored.keys() & parameters.keys() == parameters.keys()
    assert all(torch.equal(stored[weight_name], parameter) for weight_name, parameter in parameters.items())
    assert torch.equal(logits(pipeline), logits(merged))
    merged_bundle.verify()
    # The folder of peft itself gives the same bytes.
    again = stagepack.merge_adapter(bundle, lora, out=tmp_path / "again.stagepack")
    assert {file.name: file.blake3 for file in again.manifest.files} == {
        file.name: file.blake3 for file in merged_bundle.manifest.files
    }


def test_rows_of_several_adapters_answer_as_those_of_peft(tmp_path: Path) -> None:
    bundle = export_model(make_model("llama"), tmp_path, stages="layers")
    targets = {"first": ["q_proj", "up_proj"], "second": ["embed_tokens", "lm_head"], "third": "all-linear"}
    model: Any = None
    for seed, (name, modules) in enumerate(targets.items()):
        lora = save_adapter(tmp_path, AutoModelForCausalLM, seed, f"lora-{name}", target_modules=modules)
        stagepack.write_adapter(bundle, lora, out=tmp_path / name)
        if model is None:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            model = peft.PeftModel.from_pretrained(base, lora, adapter_name=name).eval()
        else:
            model.load_adapter(lora, adapter_name=name)
    pipeline = stagepack.load(bundle, adapters=[tmp_path / name for name in targets])
    for order in (["first", "second", "third"], [None, "third", "first"], ["second", "second", None]):
        expected = logits(model, adapter_names=["__base__" if name is None else name for name in order])
        torch.testing.assert_close(logits(pipeline, adapter=order), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make_config", "says"),
    [
        (lambda: peft.LoraConfig(use_dora=True, target_modules=["q_proj"]), r"found DoRA \(use_dora\)"),
        (lambda: peft.LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]), "init_lora_weights 'pissa'"),
        (lambda: peft.LoraConfig(trainable_token_indices=[1], target_modules=["q_proj"]), "trainable_token_indices"),
        (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "found LOHA"),
        (lambda: peft.LoKrConfig(target_modules=["q_proj"]), "found LOKR"),
        (lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "found IA3"),
        (lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "found PROMPT_TUNING"),
    ],
)
def test_other_kinds_are_refused_by_their_name(make_config: Any, says: str, tmp_path: Path) -> None:
    bundle = export_model(make_model("llama"), tmp_path)
    peft.get_peft_model(make_model("llama"), make_config()).save_pretrained(tmp_path / "lora")
    with pytest.raises(AdapterError, match=f"{says}.*merge it .merge_and_unload of peft"):
        stagepack.write_adapter(bundle, tmp_path / "lora", out=tmp_path / "a")


def test_a_sentence_model_embeds_with_an_adapter(tmp_path: Path) -> None:
    AutoModel.from_pretrained(minilm_encoder_folder()).save_pretrained(tmp_path / "model")
    bundle = stagepack.export(tmp_path / "model", out=tmp_path / "m.stagepack", stages=2)
    lora = save_adapter(tmp_path, AutoModel, target_modules=["query", "value", "dense"], task_type="FEATURE_EXTRACTION")
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    inputs = {"input_ids": torch.tensor([[101, 2023, 2003, 102], [101, 1037, 4937, 102]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    peft_model = loaded(tmp_path, AutoModel)
    with torch.no_grad():
        expected = peft_model(**inputs).last_hidden_state
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    with torch.no_grad():
        assert torch.equal(pipeline(**inputs, adapter="a")["last_hidden_state"], expected)
        merged = stagepack.merge_adapter(bundle, lora, out=tmp_path / "merged.stagepack")
        expected = peft_model.merge_and_unload()(**inputs).last_hidden_state
        assert torch.equal(stagepack.load(merged)(**inputs)["last_hidden_state"], expected)
