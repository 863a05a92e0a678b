"""The adapters of a stage in ONNX Runtime: its model with their changes, and their tensors in memory, stacked."""

import math
import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy
from onnxruntime import OrtValue

from stagepack.adapter.adapted_bundle import ROWS_NAME, AdaptedBundle
from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX
from stagepack.adapter.onnx_model import AdaptedModel, ModelChanges, adapt_model
from stagepack.adapter.onnx_nodes import StackedTensor
from stagepack.adapter.opened import OpenAdapter, check_shapes
from stagepack.adapter.rewrite import Pair, without_rows
from stagepack.adapter.uses import Use, find_uses
from stagepack.errors import InputError
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Graph
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.reader import OnnxFile
from stagepack_loaders.elements import Array, numpy_dtype
from stagepack_loaders.file_leases import new_memory
from stagepack_loaders.weight_files import WeightFile, map_adapter_file

_SUFFIXES: Final = {"a": A_SUFFIX, "b": B_SUFFIX, "bias": BIAS_SUFFIX}
_ROLES_OF_WHOLE: Final = frozenset({"whole", "place", "replaces"})


class StackedFile(NamedTuple):
    """The file of the stacked tensors, which is in memory alone, and its tensors as values by the names of the initializers."""

    file_name: str
    content: mmap.mmap
    values: dict[str, OrtValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAdapters:
    """The adapters of a stage.

    Attributes:
        model: the model of the stage that applies them.
        uses: what each adapter changes, in the order of their numbers.
        replacing: the numbers of the adapters that replace a weight, by its name.
        file_name: the name of the file of the stacked tensors.
        apart: for each adapter that cannot be in a call with others, by number: why.
    """

    adapters: Sequence[OpenAdapter]
    model: AdaptedModel
    uses: Sequence[Mapping[str, Use]]
    replacing: Mapping[str, Sequence[int]]
    file_name: str
    apart: Mapping[int, str]

    @classmethod
    def of(cls, bundle: AdaptedBundle, stage_number: int, onnx: OnnxFile) -> "StageAdapters | None":
        """Return the adapters of a stage, whose tensors are not read yet; None if they change nothing in it."""
        graph, pairs, apart = bundle.graph(stage_number), dict[str, Pair](), dict[int, str]()
        replacing = defaultdict[str, list[int]](list)
        uses_of_adapters = []
        for number, (name, adapter) in enumerate(bundle.adapters.items(), 1):
            uses = find_uses(graph, adapter.changes)
            check_shapes(graph, uses, adapter.document, adapter.tensors, adapter.location)
            uses_of_adapters.append(uses)
            for use in uses:
                pair, known = adapter.pairs[use.change.module], pairs.get(use.change.module, Pair(1))
                pairs[use.change.module] = Pair(max(pair.rank, known.rank), pair.has_bias or known.has_bias)
            if shared := _without_rows(bundle, graph, uses):
                apart[number] = f"{shared[0]} computes the same for all rows of a batch"
            for weight in graph.weights:
                if weight.names[0] in adapter.document.replaced:
                    replacing[weight.names[0]].append(number)
                    apart[number] = f"{name} replaces whole weights"
        uses = list({use.node: use for uses in uses_of_adapters for use in uses}.values())
        if not uses and not replacing:
            return None
        changes = ModelChanges(
            uses=uses,
            pairs=pairs,
            replaced=[
                (weight, len(replacing[weight.names[0]])) for weight in graph.weights if weight.names[0] in replacing
            ],
            count=len(uses_of_adapters),
            shared_modules=frozenset(_without_rows(bundle, graph, uses)),
        )
        # ONNX Runtime looks for the file, in whose place it is given memory.
        file_name = bundle.stages[stage_number].graph
        return cls(
            adapters=list(bundle.adapters.values()),
            model=adapt_model(onnx.content, graph, changes, ROWS_NAME, file_name),
            uses=[{use.change.module: use for use in uses} for uses in uses_of_adapters],
            replacing=replacing,
            file_name=file_name,
            apart=apart,
        )

    def described(self, onnx: OnnxFile) -> OnnxFile:
        """Return the model that applies the adapters, and what is known of its file; `onnx` is that of the stage."""
        new_names = self.model.new_names
        initializers = [
            replace(tensor, name=new_names.get(tensor.name, tensor.name)) for tensor in onnx.model.initializers
        ]
        return OnnxFile(self.model.content, replace(onnx.model, initializers=tuple(initializers)))

    def read(self, *, verify: bool) -> "StackedFile":
        """Return the stacked tensors."""
        content = new_memory(self.model.byte_count)
        arrays = [
            numpy.frombuffer(content, dtype, math.prod(stacked.shape), stacked.start).reshape(stacked.shape)
            for stacked in self.model.tensors
            if (dtype := numpy_dtype(stacked.dtype))
        ]
        for number, (adapter, uses) in enumerate(zip(self.adapters, self.uses, strict=True), 1):
            file = map_adapter_file(adapter, verify=verify)
            for stacked, array in zip(self.model.tensors, arrays, strict=True):
                if number in self.replacing.get(stacked.target, ()):
                    _fill_whole(array, number, stacked, self.replacing[stacked.target].index(number), adapter, file)
                elif stacked.target in uses and stacked.role not in _ROLES_OF_WHOLE:
                    _fill(array, number, stacked, uses[stacked.target], adapter, file)
        values = {
            stacked.name: OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[stacked.dtype])
            for stacked, array in zip(self.model.tensors, arrays, strict=True)
        }
        return StackedFile(self.file_name, content, values)

    def check_rows(self, numbers: Array) -> None:
        """Refuse a call whose rows have several adapters, if one of them is for all rows."""
        several = set(numbers.tolist()) if self.apart else set()
        reasons = [self.apart[number] for number in several if number in self.apart] if len(several) > 1 else []
        if reasons:
            raise InputError(
                f"adapter: rows of one call cannot have several adapters: {reasons[0]}: call each on its own"
            )


def _without_rows(bundle: AdaptedBundle, graph: Graph, uses: Sequence[Use]) -> list[str]:
    return [] if bundle.batch is None else without_rows(graph, uses, bundle.batch)


def _stored(name: str, adapter: OpenAdapter, file: WeightFile) -> Array:
    """A tensor of an adapter, on the memory of its file."""
    stored = adapter.tensors[name]
    dtype = numpy_dtype(TORCH_DTYPES[stored.dtype])
    elements = numpy.frombuffer(file.content, dtype, (stored.end - stored.start) // dtype.itemsize, stored.start)
    return elements.reshape(stored.shape)


def _fill_whole(
    array: Array, number: int, stacked: StackedTensor, place: int, adapter: OpenAdapter, file: WeightFile
) -> None:
    """Write what an adapter replaces a weight by into a stacked tensor of the weight."""
    if stacked.role == "whole":
        array[place] = _stored(stacked.target, adapter, file).astype(array.dtype)
    else:
        array[number] = place if stacked.role == "place" else True


def _fill(array: Array, number: int, stacked: StackedTensor, use: Use, adapter: OpenAdapter, file: WeightFile) -> None:
    """Write the part of an adapter into a stacked tensor of zeros. Ranks are filled up with zeros."""
    if stacked.role == "has":
        array[number] = True
    elif stacked.role == "scale":
        array[number] = adapter.changes[use.change.module].scale
    elif (name := stacked.target + _SUFFIXES[stacked.role]) in adapter.tensors:
        part = _stored(name, adapter, file).astype(array.dtype)
        if stacked.role == "bias":
            array[number, 0] = part
        elif stacked.role == "a" and use.kind == "embedding":
            size_in, _ = use.sizes
            array[number * size_in : (number + 1) * size_in, : part.shape[0]] = part.T
        elif stacked.role == "a":
            array[number, :, : part.shape[0]] = part.T
        else:
            array[number, : part.shape[1]] = part.T
