"""Models of the benchmarks: equal layers, a Llama of any size, and tokens for it."""

import importlib
from typing import Any

import torch


class Layers(torch.nn.Module):
    """Equal linear layers, each with an activation."""

    def __init__(self, count: int, width: int, *, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=bias, dtype=dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to `[rows, width]`."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def without_values(make_model: Any) -> Any:
    """Make a model whose weights have memory, and whatever numbers lie there."""
    with torch.device("meta"):
        model = make_model()
    return model.to_empty(device="cpu")


def llama_config(*, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **more: Any) -> Any:
    """The configuration of a Llama."""
    return importlib.import_module("transformers").LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


def llama(**sizes: Any) -> Any:
    """A Llama with random weights, always the same; see `llama_config`."""
    torch.manual_seed(0)
    return importlib.import_module("transformers").LlamaForCausalLM(llama_config(**sizes)).eval()
