"""Weights that a bundle cannot hold: those that torch.ao.quantization has packed for a processor, and quantized tensors."""

import itertools

import torch

# By which `torch_messages` finds its advice.
_PACKED = "which neither torch.export nor a bundle can hold"


def packed_weights(model: torch.nn.Module) -> str | None:
    """Return which module of a model has such weights; None if none has."""
    for path, module in model.named_modules():
        # A packed weight is an attribute of a module of its own, such as `0._packed_params`.
        owner_path = ".".join(itertools.takewhile(lambda part: not part.startswith("_"), path.split(".")))
        owner = model.get_submodule(owner_path)
        place = f"{owner_path or 'the model itself'} ({type(owner).__module__}.{type(owner).__qualname__})"
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()) and _is_quantized(module):
            return f"{place} has weights that torch.ao.quantization packed, {_PACKED}"
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_quantized:
                dtype = str(tensor.dtype).removeprefix("torch.")
                return f"{place} has a quantized tensor of dtype {dtype}, {name}, {_PACKED}"
    return None


def _is_quantized(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.")
