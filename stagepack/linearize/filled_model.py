"""Give the weights of a model their data from the weight files of its own bundle, so that it can run."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch

from stagepack.capture.checkpoint import map_tensor
from stagepack.capture.programs import Capture
from stagepack.format.graph import Weight
from stagepack.format.weights import StoredTensor
from stagepack.linearize.weight_table import WeightTable
from stagepack.torch_internals import weight_tensors

# The file and the position of each stored tensor, by stored name.
TensorLocations = Mapping[str, tuple[Path, StoredTensor]]


def fill_modules(
    modules: Iterable[torch.nn.Module],
    capture: Capture,
    weights: WeightTable,
    locations: TensorLocations,
    written_names: Collection[str],
) -> None:
    """Give modules whose weights are deferred the data of their weights.

    The weights are mapped from files for reading only, so they take no memory of the process. Their addresses are aligned as in every
    loaded bundle, so that kernels give the same bits.
    """
    fake_tensors = weights.tensors
    entries = {id(fake_tensors[weight_name]): weight for weight in weights.weights for weight_name in weight.names}
    known: dict[int, torch.Tensor] = {}

    def filled(fake_tensor: torch.Tensor) -> torch.Tensor:
        if id(fake_tensor) not in known:
            weight = entries.get(id(fake_tensor))
            is_mapped = weight is not None and _is_plain(weight) and weight.stored in locations
            if weight is not None and is_mapped and not set(weight.names) & set(written_names):
                path, stored = locations[weight.stored]
                data = map_tensor(path, stored.start, fake_tensor.dtype, tuple(fake_tensor.shape))
            else:
                data = capture.data(fake_tensor).detach().clone()
            is_parameter = isinstance(fake_tensor, torch.nn.Parameter)
            known[id(fake_tensor)] = (
                torch.nn.Parameter(data, requires_grad=fake_tensor.requires_grad) if is_parameter else data
            )
        return known[id(fake_tensor)]

    for module in modules:
        _replace_tensors(module, lambda tensor: filled(tensor) if _is_deferred(capture, tensor) else tensor)


def _is_plain(weight: Weight) -> bool:
    """Whether a weight is in its file as it is in memory."""
    return weight.base is None and weight.strides is None and not weight.zeros


def _is_deferred(capture: Capture, tensor: torch.Tensor) -> bool:
    return capture.deferred is not None and tensor in capture.deferred


def _replace_tensors(module: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for submodule in module.modules():
        for of_parameters in (True, False):
            for tensor_name, tensor in list(weight_tensors(submodule, parameters=of_parameters).items()):
                if tensor is not None and (new_tensor := replacement(tensor)) is not tensor:
                    # Not into the dict: modules such as LSTM keep lists of their parameters, which their own method updates.
                    setattr(submodule, tensor_name, new_tensor)
