"""Small models of transformers, their bundles, and modules that adapters change."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import stagepack

IDS = torch.tensor([[5, 9, 31, 42], [7, 8, 9, 1], [3, 3, 3, 4]])
MASK = torch.ones_like(IDS)
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        return cast_model(GPT2LMHeadModel(config), dtype)
    if name == "bert":
        return cast_model(BertForSequenceClassification(BertConfig(**SIZES, num_attention_heads=4)), dtype)
    return cast_model(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)), dtype)


def cast_model(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    cast: PreTrainedModel = model.to(dtype).eval()
    return cast


def export_model(model: PreTrainedModel, folder: Path, **options: Any) -> stagepack.Bundle:
    """The bundle of a model, exported from its folder."""
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
    return stagepack.export(folder / "model", out=folder / "model.stagepack", overwrite=True, **options)


def logits(model: Any, **arguments: Any) -> torch.Tensor:
    """What a model or a pipeline answers."""
    with torch.no_grad():
        answer = model(input_ids=IDS, attention_mask=MASK, **arguments)
    found: torch.Tensor = answer["logits"]
    return found
