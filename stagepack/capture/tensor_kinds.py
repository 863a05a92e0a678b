"""Tensors of a model, or of its example, that cannot be captured, refused by name: torch meets them without a name, or not at all."""

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from stagepack.capture.inputs import Inputs, inputs_by_parameter
from stagepack.errors import CaptureError
from stagepack.torch_internals import tree_leaves

SCRIPTED: Final = "is TorchScript, which torch.export does not trace: export the torch.nn.Module that it was made of"
# By which `torch_messages` finds its advice.
_PACKED: Final = "which neither torch.export nor a bundle can hold"


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor, or for one of a class that wraps others those that it consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    attribute_names, _ = tensor.__tensor_flatten__()
    for attribute_name in attribute_names:
        yield from plain_tensors(getattr(tensor, attribute_name))


def why_unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the memory of a tensor cannot be read, and what to do; None if it can be, or the tensor is one without data."""
    if is_lazy(tensor):
        return "has no shape before the model is first called: call the model once, as in model(x), before the export"
    if isinstance(tensor, _distributed_class()):
        return (
            "is a DTensor, of which each process has a part: export a model with whole tensors, such as tensor.full_tensor() "
            "(get_model_state_dict of torch.distributed.checkpoint.state_dict returns all of them with full_state_dict=True)"
        )
    if not all(map(_is_readable, plain_tensors(tensor))):
        return f"is a {type(tensor).__name__}, which has no memory of its own: make it a plain torch.Tensor before the export"
    return None


def refuse_unreadable_weights(model: torch.nn.Module) -> None:
    """Refuse a model with a parameter or a buffer whose memory cannot be read."""
    for name, weight in _weights(model):
        if (reason := why_unreadable(weight)) is not None:
            raise CaptureError(f"{type(model).__name__}: {name} {reason}")


def refuse_untraceable(model: torch.nn.Module, inputs: Inputs) -> None:
    """Refuse a model with a parameter, a buffer or an input that ``torch.export`` does not take, or that cannot be copied."""
    for name, weight in _weights(model):
        if (reason := why_unreadable(weight) or _why_untraceable(weight)) is not None:
            raise CaptureError(f"{type(model).__name__}: {name} {reason}")
    try:
        input_of_parameter = inputs_by_parameter(model.forward, inputs)
    except CaptureError:
        return  # torch.export says so, with advice
    for parameter, value in input_of_parameter.items():
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                continue
            reason = why_unreadable(leaf) or _why_untraceable(leaf) or _why_no_input(leaf)
            if reason is not None:
                raise CaptureError(f"{type(model).__name__}: the input {parameter} {reason}")


def untraceable_part(model: torch.nn.Module) -> str | None:
    """Return which part of a model ``torch.export`` does not take, and why: TorchScript, packed weights, an attribute; or None."""
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return f"{scripted[0]}: {SCRIPTED}"
    return _packed_weights(model) or _untraceable_attribute(model)


def _packed_weights(model: torch.nn.Module) -> str | None:
    """Which module of a model has weights that torch.ao.quantization packed for a processor, or None."""
    for path, module in model.named_modules():
        # A packed weight is an attribute of a module of its own, such as `0._packed_params`.
        owner_path = ".".join(itertools.takewhile(lambda part: not part.startswith("_"), path.split(".")))
        owner = model.get_submodule(owner_path)
        place = f"{owner_path or 'the model itself'} ({type(owner).__module__}.{type(owner).__qualname__})"
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()) and _is_quantized(module):
            return f"{place} has weights that torch.ao.quantization packed, {_PACKED}"
    return None


def _is_quantized(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.")


def _untraceable_attribute(model: torch.nn.Module) -> str | None:
    """Which attribute of a model, besides its weights, holds a tensor that ``torch.export`` does not take, and why; or None."""
    for module_path, module in model.named_modules():
        for attribute_name, value in vars(module).items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and (reason := why_unreadable(leaf) or _why_untraceable(leaf)):
                    return f"the attribute {f'{module_path}.{attribute_name}'.removeprefix('.')} {reason}"
    return None


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter_name, parameter in model.named_parameters():
        yield f"the parameter {parameter_name}", parameter
    for buffer_name, buffer in model.named_buffers():
        yield f"the buffer {buffer_name}", buffer


def _why_untraceable(tensor: torch.Tensor) -> str | None:
    """Why ``torch.export`` does not take a tensor that has memory, and what to do, or None."""
    if tensor.is_nested:
        return "is a nested tensor: give a padded one (tensor.to_padded_tensor(0.0)), and the lengths as a tensor of their own"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}), which torch.export does not take: give tensor.dequantize(), or quantize with torchao"
    return None


def _why_no_input(tensor: torch.Tensor) -> str | None:
    """Why no copy of an input can be given to each run of the model and to its bundle, and what to do, or None."""
    if hasattr(tensor, "__tensor_flatten__"):
        return f"is a {type(tensor).__name__}, which consists of other tensors: give these, and let the model make it of them"
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if is_plain and tensor.device.type != "meta" and tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return "has no data: its storage is empty"
    try:
        if not is_plain:
            copy.deepcopy(tensor.detach())
    except Exception:  # noqa: BLE001 - the code of a class of tensors raises any class
        kind = type(tensor).__name__ if tensor.layout == torch.strided else f"tensor of the layout {tensor.layout}"
        return f"is a {kind}, which copy.deepcopy does not copy: give a plain torch.Tensor"
    return None


def _distributed_class() -> Any:
    """``DTensor``, if something has imported it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def _is_readable(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    try:
        storage = tensor.untyped_storage()
        # A fake tensor has another device than its storage.
        if storage.device.type != "meta":
            storage.data_ptr()
    except RuntimeError:
        return False
    return True
