"""Adapters as peft saves them, and the answers of a model with one, computed by hooks as the forward of peft computes them."""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import stagepack
from tests.conformance.vectors import TINY

PREFIX = "base_model.model."


class TinyLayer(torch.nn.Module):
    """The modules of the worked example of SPEC.md, the bundle `TINY`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)


def write_tiny_adapter(folder: Path, rank: int = 2, seed: int = 0, **settings: Any) -> Path:
    """Write an adapter of the bundle `TINY`."""
    with tempfile.TemporaryDirectory() as lora_parent:
        lora = write_lora(TinyLayer(), Path(lora_parent) / "lora", {"layer": rank}, seed, **settings)
        return stagepack.write_adapter(TINY, lora, out=folder).path


def write_lora(
    model: torch.nn.Module,
    folder: Path,
    ranks: Mapping[str, int],
    seed: int = 0,
    replaced: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of some modules of a model, with random pairs of the given ranks."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, rank in ranks.items():
        module: Any = model.get_submodule(path)
        size_in, size_out = module.weight.shape if is_in_out(module) else module.weight.shape[::-1]
        a, b = (torch.randn(sizes, generator=generator) / 4 for sizes in ((rank, size_in), (size_out, rank)))
        if isinstance(module, torch.nn.Embedding):
            tensors |= {f"{path}.lora_embedding_A": a, f"{path}.lora_embedding_B": b}
        else:
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    tensors |= replaced or {}
    folder.mkdir()
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": dict(ranks), "target_modules": [*ranks]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | settings))
    return folder


def is_in_out(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is [in, out]: of an embedding, and of the Conv1D of transformers."""
    return isinstance(module, torch.nn.Embedding) or type(module).__name__ == "Conv1D"


@contextlib.contextmanager
def adapted(model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Let a model answer as with the adapter in a folder."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    loaded = load_file(folder / "adapter_model.safetensors")
    # Copied, as peft does into parameters: how the product with a vector rounds depends on the alignment of memory.
    tensors = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in loaded.items()}
    hooks = []
    for name in tensors:
        path, _, kind = name.partition(".lora_")
        if kind not in ("A.weight", "embedding_A"):
            continue
        b_name = f"{path}.lora_{kind.replace('A', 'B', 1)}"
        pair = (tensors[name], tensors[b_name], tensors.get(f"{path}.lora_B.bias"))
        rank = len(pair[0])
        alpha = settings.get("alpha_pattern", {}).get(path, settings["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        hooks.append(model.get_submodule(path).register_forward_hook(_hook(pair, scale)))
    state = model.state_dict(keep_vars=True)
    before = {name: state[name].detach().clone() for name in tensors if name in state}
    try:
        with torch.no_grad():
            for name in before:
                state[name].copy_(tensors[name])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, tensor in before.items():
                state[name].copy_(tensor)


def _hook(pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], scale: float) -> Any:
    def add(module: torch.nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        dtype = result.dtype if result.dtype == torch.float64 else torch.float32
        a, b, bias = (None if tensor is None else tensor.to(dtype) for tensor in pair)
        assert a is not None
        assert b is not None
        if isinstance(module, torch.nn.Embedding):
            change = (functional.embedding(args[0], a.T) @ b.T) * scale
        else:
            change = functional.linear(functional.linear(args[0].to(dtype), a), b, bias) * scale
        return (result + change).to(result.dtype)

    return add
