"""A decoder with a key-value cache in its stages.

Run ``stagepack export stagepack.examples.decoder:make --inputs stagepack.examples.decoder:inputs -o decoder.stagepack``. Its weights are
random; load your own here. Its tokens are bytes, so it needs no tokenizer.
"""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import stagepack

MAX_POSITIONS = 128  # in the cache


def llama() -> LlamaForCausalLM:
    """Return the model without a cache."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def make() -> torch.nn.Module:
    """Return the model that reads one token per call; its buffers hold the keys and values of the earlier tokens."""
    model = llama()
    cache_config = {"batch_size": 1, "max_cache_len": MAX_POSITIONS, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache_config)
    return TorchExportableModuleWithStaticCache(model)


def inputs() -> stagepack.Inputs:
    """Return example inputs: a token and its position."""
    return stagepack.Inputs(kwargs={"input_ids": torch.tensor([[65]]), "cache_position": torch.tensor([0])})
