"""A decoder to serve, whose key-value cache lives in its stages: `stagepack export decoder.py:make --inputs decoder.py:inputs`.

Its weights are random; load yours here. It reads and writes bytes, so that no tokenizer is needed.
"""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import stagepack

LONGEST = 128  # positions in the cache


def llama() -> LlamaForCausalLM:
    """The model, without a cache of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def make() -> torch.nn.Module:
    """The model, one token a call; buffers hold the keys and values of the tokens before."""
    model = llama()
    cache = {"batch_size": 1, "max_cache_len": LONGEST, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    return TorchExportableModuleWithStaticCache(model)


def inputs() -> stagepack.Inputs:
    """A token and its position."""
    return stagepack.Inputs(kwargs={"input_ids": torch.tensor([[65]]), "cache_position": torch.tensor([0])})
