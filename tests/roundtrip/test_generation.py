"""A decoder with a static cache, cut in three, writes what transformers writes."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import stagepack
from stagepack_loaders.pipeline import Pipeline
from tests.zoo.apart import load_apart

NEW_TOKENS = 32


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)).eval()
    prompt = torch.tensor([[5, 301, 42, 7]])
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)

    cache = {"batch_size": 1, "max_cache_len": 48, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    decoder = TorchExportableModuleWithStaticCache(model)
    bundle = stagepack.export(
        decoder,
        kwargs={"input_ids": prompt[:, :1], "cache_position": torch.tensor([0])},
        out=tmp_path / "decoder.stagepack",
        split_at=["model.model.layers.1", "model.model.layers.3"],
    )

    caches = [[name for name in stage.state if "_cache_" in name] for stage in bundle.stages]
    assert [len(names) for names in caches] == [2, 4, 2]
    for pipe in (stagepack.load(bundle), load_apart(bundle, types=(), allow_ops=())):
        for _ in range(2):
            assert torch.equal(_greedy(pipe, prompt), expected)
            pipe.reset_state()


def _greedy(pipe: Pipeline, prompt: torch.Tensor) -> torch.Tensor:
    """The prompt and the most likely tokens after it, one token a call."""
    tokens = prompt
    for position in range(prompt.shape[1] + NEW_TOKENS - 1):
        logits = pipe(input_ids=tokens[:, position : position + 1], cache_position=torch.tensor([position]))
        if position >= prompt.shape[1] - 1:
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens
