"""The adapters of a stage in ONNX Runtime: its model with their changes, and their tensors in memory, stacked."""

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy
from onnxruntime import OrtValue

from stagepack.adapter.adapted_bundle import ROWS_NAME, AdaptedBundle
from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX
from stagepack.adapter.onnx_model import AdaptedModel, StackedTensor, adapt_model
from stagepack.adapter.opened import OpenAdapter, check_shapes
from stagepack.adapter.rewrite import Pair, without_rows
from stagepack.adapter.uses import Use, find_uses
from stagepack.errors import AdapterError, InputError
from stagepack.format.chunks import check_content
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.reader import OnnxFile
from stagepack.format.rules import raise_problems
from stagepack_loaders.elements import Array, numpy_dtype
from stagepack_loaders.file_leases import new_memory
from stagepack_loaders.weight_files import WeightFile, map_weight_file

_SUFFIXES: Final = {"a": A_SUFFIX, "b": B_SUFFIX, "bias": BIAS_SUFFIX}


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
        file_name: the name of the file of the stacked tensors.
        apart: for each adapter that cannot be in a call with others, by number: why.
    """

    adapters: Sequence[OpenAdapter]
    model: AdaptedModel
    uses: Sequence[Mapping[str, Use]]
    apart: Mapping[int, str]
    file_name: str

    @classmethod
    def of(cls, bundle: AdaptedBundle, stage_number: int, onnx: OnnxFile) -> "StageAdapters | None":
        """Return the adapters of a stage, whose tensors are not read yet; None if they change nothing in it."""
        graph, adapters = bundle.graph(stage_number), list(bundle.adapters.values())
        all_uses: dict[int, Use] = {}
        pairs: dict[str, Pair] = {}
        uses_of_adapters: list[Mapping[str, Use]] = []
        apart: dict[int, str] = {}
        for number, (name, adapter) in enumerate(bundle.adapters.items(), 1):
            _refuse_replaced(adapter, {weight.names[0] for weight in graph.weights})
            uses = find_uses(graph, adapter.changes)
            check_shapes(graph, uses, adapter.document, adapter.tensors, str(adapter.path))
            all_uses |= {use.node: use for use in uses}
            uses_of_adapters.append({use.change.module: use for use in uses})
            for module in uses_of_adapters[-1]:
                pair, known = adapter.pairs[module], pairs.get(module, Pair(1))
                pairs[module] = Pair(max(pair.rank, known.rank), pair.has_bias or known.has_bias)
            if bundle.batch is not None and (shared := without_rows(graph, uses, bundle.batch)):
                apart[number] = f"{name} changes {shared[0]}, which computes the same for all rows of a batch"
        if not all_uses:
            return None
        ordered = [use for _, use in sorted(all_uses.items())]
        shared = [] if bundle.batch is None else without_rows(graph, ordered, bundle.batch)
        # ONNX Runtime looks for the file, in whose place it is given memory.
        file_name = bundle.stages[stage_number].graph
        model = adapt_model(onnx.content, graph, ordered, pairs, len(adapters), ROWS_NAME, shared, file_name)
        return cls(adapters=adapters, model=model, uses=uses_of_adapters, apart=apart, file_name=file_name)

    def read(self, *, verify: bool) -> "StackedFile":
        """Return the stacked tensors."""
        content = new_memory(self.model.byte_count)
        arrays = [
            numpy.frombuffer(content, dtype, math.prod(stacked.shape), stacked.start).reshape(stacked.shape)
            for stacked in self.model.tensors
            if (dtype := numpy_dtype(stacked.dtype))
        ]
        for number, (adapter, uses) in enumerate(zip(self.adapters, self.uses, strict=True), 1):
            entry = adapter.document.file
            file = map_weight_file(adapter.path / entry.name)
            if verify or len(file.content) != entry.size:
                raise_problems(check_content(entry, memoryview(file.content)))
            for stacked, array in zip(self.model.tensors, arrays, strict=True):
                if stacked.module in uses:
                    _fill(array, number, stacked, uses[stacked.module], adapter, file)
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


def _refuse_replaced(adapter: OpenAdapter, weight_names: set[str]) -> None:
    """Refuse an adapter that replaces weights of a stage: the session would hold them several times."""
    if replaced := sorted(weight_names.intersection(adapter.document.replaced)):
        raise AdapterError(
            f"{adapter.path}: replaces the whole weight {replaced[0][:120]}, and ONNX Runtime applies low-rank changes alone: merge the "
            "adapter into a bundle of its own (stagepack adapter --merge), or choose runtime='torch'"
        )


def _fill(array: Array, number: int, stacked: StackedTensor, use: Use, adapter: OpenAdapter, file: WeightFile) -> None:
    """Write the part of an adapter into a stacked tensor of zeros. Ranks are filled up with zeros."""
    if stacked.role == "has":
        array[number] = True
    elif stacked.role == "scale":
        array[number] = adapter.changes[use.change.module].scale
    elif (stored := adapter.tensors.get(use.change.module + _SUFFIXES[stacked.role])) is not None:
        dtype = numpy_dtype(TORCH_DTYPES[stored.dtype])
        part = numpy.frombuffer(file.content, dtype, (stored.end - stored.start) // dtype.itemsize, stored.start)
        part = part.reshape(stored.shape).astype(array.dtype)
        if stacked.role == "bias":
            array[number, 0] = part
        elif stacked.role == "a" and use.kind == "embedding":
            size_in, _ = use.sizes
            array[number * size_in : (number + 1) * size_in, : part.shape[0]] = part.T
        elif stacked.role == "a":
            array[number, :, : part.shape[0]] = part.T
        else:
            array[number, : part.shape[1]] = part.T
