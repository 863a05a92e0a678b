"""The weights of a stage while their files arrive: each use waits for its own bytes only."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.graph import Graph, Weight
from stagepack.format.weights import StoredTensor
from stagepack_loaders.torch.arriving_files import ArrivingFile, ArrivingFiles
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_gate import WeightUse
from stagepack_loaders.torch.weights import as_weight, lay_out, zero_weight


class ArrivingWeight:
    """A weight on the memory of its arriving file. The stages on one device share those that are one tensor in the model.

    Attributes:
        tensor: the weight. Its content is undefined until `wait` returns.
    """

    def __init__(
        self,
        weight: Weight,
        stored_tensors: Mapping[str, tuple[Path, StoredTensor]],
        files: Mapping[str, ArrivingFile],
        device: torch.device,
    ) -> None:
        self._weight = weight
        self._location = _location(weight, stored_tensors, files)
        self._lock = threading.Lock()
        # A weight whose strides are not those of the stored tensor is a copy of it, made when it has arrived.
        self._uncopied: torch.Tensor | None = None
        if self._location is None:
            tensor = zero_weight(weight, device)
        elif weight.base is None and weight.strides is not None:
            dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
            tensor = torch.empty_strided(weight.shape, weight.strides, dtype=dtype, device=device)
            self._uncopied = tensor
        else:
            tensor = _stored_weight(weight, self._location)
        self.tensor = as_weight(weight, tensor)

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the weight has arrived."""
        if self._location is None:
            return
        file, stored = self._location
        file.wait(stored.start, stored.end)
        with self._lock:
            if self._uncopied is not None:
                self._uncopied.copy_(_stored_weight(self._weight, self._location))
                self._uncopied = None


class ArrivingWeights:
    """The tensors of a stage, on the memory of its arriving files. It is the gate of the stage; see `WeightGate`.

    Attributes:
        tensors: the weights by value name. Their content is undefined until they are waited for.
    """

    def __init__(
        self,
        graph: Graph,
        uses: Sequence[WeightUse],
        weights: Sequence[ArrivingWeight],
        files: Sequence[ArrivingFile],
        sources: ArrivingFiles,
    ) -> None:
        self._uses = uses
        self._weights = {weight.value: arriving for weight, arriving in zip(graph.weights, weights, strict=True)}
        self._weight_list = list(weights)
        self._files = files
        self._sources: ArrivingFiles | None = sources
        self._waiting = [True] * len(uses)
        self.tensors = {value_name: arriving.tensor for value_name, arriving in self._weights.items()}

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`. The weights that the module was called with are returned: the user may have replaced them."""
        if self._waiting[use_index]:
            for weight_index in self._uses[use_index].weights:
                self._weight_list[weight_index].wait()
            self._waiting[use_index] = False
        return given_weights

    def release(self, use_index: int) -> None:
        """See `WeightGate`. The weights stay."""

    def has_arrived(self) -> bool:
        """Whether all weights are there, so that nothing needs to be asked any more."""
        if self._sources is not None and all(file.has_arrived() for file in self._files):
            self.wait()
        return self._sources is None

    def wait(self, value_names: Sequence[str] | None = None) -> None:
        """Return when weights have arrived.

        value_names: the value names of the weights; None for all of them, and all bytes of their files.
        """
        if self._sources is None:
            return
        for value_name in self._weights if value_names is None else value_names:
            self._weights[value_name].wait()
        if value_names is None:
            for file in self._files:
                file.wait(0, file.entry.size)
            self._sources = None

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `GatedWeights`. All can be converted when they have arrived."""
        self.wait()

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module that asks for its weights."""
        return module(*values)


def _location(
    weight: Weight, stored_tensors: Mapping[str, tuple[Path, StoredTensor]], files: Mapping[str, ArrivingFile]
) -> tuple[ArrivingFile, StoredTensor] | None:
    """The file of a weight and its position there; None if no file has it."""
    if weight.zeros:
        return None
    path, stored = stored_tensors[weight.stored]
    return files[path.name], stored


def _stored_weight(weight: Weight, location: tuple[ArrivingFile, StoredTensor]) -> torch.Tensor:
    file, stored = location
    return lay_out(weight, file.tensor_bytes(stored.start, stored.end))
